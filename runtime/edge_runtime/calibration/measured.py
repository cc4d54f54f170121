"""Values that are measured on the first uses of a bundle on a machine, and cached in one file.

Because the load of a machine changes, the first few uses measure a value and combine the results. A value that was measured while other
programs kept the machine busy is provisional: it is cached and used, and measured again later, when the machine is quiet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from edge_devices.errors import EdgeError
from edge_devices.files.typed_json import from_json, to_json
from edge_devices.files.user_cache import CACHE_VARIABLE, cache_folder, cache_put, entry_key, read_entries
from edge_devices.machine.processors import LoadWatch, load_now
from edge_devices.waiting import Report, Waiting, silent_wait
from edge_runtime.bundle.manifest import Manifest
from edge_runtime.drafting.acceptance_model import EXPORTED_WEIGHT, AcceptanceModel

CACHE_NAME = "measured.json"
# How many measurements are combined.
TIMES = 3
# A provisional value is not measured again before this time, even if the machine looks quiet.
RETRY_SECONDS = 600.0

T = TypeVar("T")
Notify = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Known(Generic[T]):
    """An entry of the file: a value, how many times it was measured, when last (seconds since 1970), and whether load disturbed it."""

    value: T
    times: int
    measured_at: float
    provisional: bool

    def is_due(self, times: int) -> bool:
        """Whether the value should be measured again if the machine is quiet."""
        return abs(time.time() - self.measured_at) > RETRY_SECONDS if self.provisional else self.times < times


@dataclass(frozen=True, kw_only=True)
class MeasuredValue(Generic[T]):
    """A kind of value that is measured on the first `times` uses.

    `kind` names its entries in the file; `value_class` is its dataclass, which raises ValueError or an EdgeError for impossible values;
    `doing` is what a command shows meanwhile. `disturbed_by_load` says whether load can have changed a value.
    """

    kind: str
    value_class: type[T]
    doing: str
    times: int = TIMES
    disturbed_by_load: Callable[[T], bool] = lambda _: True

    def known_or_measured(
        self,
        key: str,
        measure: Callable[[Report, Known[T] | None], T],
        notify: Notify,
        *,
        waiting: Waiting = silent_wait,
        fits: Callable[[T], bool] = lambda _: True,
    ) -> T:
        """Returns the cached value, or the result of `measure`, which gets a sound cached value to combine its own with, if there is one.

        `measure` is called if there is no cached value that fits. It is also called on a quiet machine if the cached value was measured
        too few times, or is provisional and old enough. A disturbed result does not replace a sound value; it is used once.
        """
        known = self.known(key, fits)
        if known is not None and not known.is_due(self.times):
            return known.value
        before = load_now()
        if known is not None and before.is_busy:
            return known.value
        sound = known if known is not None and not known.provisional else None
        watch = LoadWatch()
        with waiting(self.doing) as report:
            value = measure(report, sound)
        load = before if before.is_busy else watch.load()
        disturbed = load.is_busy and self.disturbed_by_load(value)
        if disturbed:
            notify(f"This machine is busy: what is measured now is provisional and will be measured again later ({load.words()}).")
        if sound is None or not disturbed:
            self.keep(key, value, notify, times=sound.times + 1 if sound else 1, provisional=disturbed)
        return value

    def known(self, key: str, fits: Callable[[T], bool] = lambda _: True) -> Known[T] | None:
        """Returns the entry of `key`, no matter how old; None if there is none that can be read and fits. Measures nothing."""
        known = self._known(read_entries(cache_file()).get(f"{self.kind} {key}"))
        return known if known is not None and fits(known.value) else None

    def keep(self, key: str, value: T, notify: Notify, *, times: int = 1, provisional: bool = False) -> None:
        """Caches a value. If the file cannot be written, `notify` gets a sentence."""
        known = Known(value=value, times=times, measured_at=time.time(), provisional=provisional)
        error = cache_put(cache_file(), f"{self.kind} {key}", to_json(known))
        if error is not None:
            place = f"{cache_file()} ({error}); set {CACHE_VARIABLE} to a folder that only you can write"
            notify(f"What is measured on first use could not be kept in {place}.")

    def kept(self, path: Path | None = None) -> Iterator[tuple[str, T]]:
        """Yields the keys and values in the file, the newest last, including those of other machines; skips damaged ones."""
        for name, data in read_entries(path or cache_file()).items():
            kind, _, key = name.partition(" ")
            known = self._known(data) if kind == self.kind else None
            if known is not None:
                yield key, known.value

    def _known(self, data: object) -> Known[T] | None:
        """Reads an entry; None for a damaged one."""
        try:
            known: Known[Any] = from_json(Known, data, self.kind)
            value = from_json(self.value_class, known.value, self.kind)
        except (ValueError, EdgeError):
            return None
        return replace(known, value=value) if known.times >= 1 else None


def cache_file() -> Path:
    """Returns the path of the file: measured.json in $EDGE_MTP_CACHE, or in ~/.cache/edge-mtp."""
    return cache_folder() / CACHE_NAME


def without_repeats(notify: Notify) -> Notify:
    """Returns `notify` without repeated sentences. Sentences that differ only in the brackets at their end count as the same."""
    passed: set[str] = set()

    def notify_once(sentence: str) -> None:
        head = sentence.partition(" (")[0] if sentence.endswith(").") else sentence
        if head not in passed:
            passed.add(head)
            notify(sentence)

    return notify_once


def exported_counts(manifest: Manifest, parity: object) -> object:
    """Returns the bundle's acceptance counts: those in the manifest, else those that the export recorded in `parity`, else None."""
    drafts = parity.get("drafts") if isinstance(parity, dict) else None
    return manifest.acceptance or (drafts.get("confidence") if isinstance(drafts, dict) else None)


class AcceptanceCache:
    """The cached acceptance counts of a pair and drafter, which `facts` identify; all its sessions share them."""

    def __init__(self, facts: Sequence[object], exported: object = None) -> None:
        """`exported` are the counts in the bundle, from which the first use starts."""
        self._exported = exported
        self._path, self._name = cache_file(), f"drafts {entry_key([*map(str, facts)])}"

    @cached_property
    def model(self) -> AcceptanceModel:
        """The model with the counts of all earlier uses. If they are missing or damaged, it has the exported counts, or the prior."""
        cached = AcceptanceModel.from_json(read_entries(self._path).get(self._name))
        return cached or AcceptanceModel.from_json(self._exported, EXPORTED_WEIGHT) or AcceptanceModel()

    def save(self) -> None:
        """Caches what was learned. If the file cannot be written, the next use learns it again."""
        if "model" in self.__dict__ and self.model.observed:
            cache_put(self._path, self._name, self.model.to_json())
