"""Which backend runs a bundle of both formats faster on this machine: measured on first use, then cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from edge_devices.files.user_cache import cache_folder, cache_put, entry_key, read_entries
from edge_devices.machine.facts import cpu_identity, installed_version
from edge_runtime.backends.kernels.loader import variant
from edge_runtime.backends.selection import BackendKind
from edge_runtime.calibration.quiet import QuietCheck
from edge_runtime.errors import EdgeRuntimeError

CACHE_NAME = "backends.json"
WORDS: dict[BackendKind, str] = {"llama": "llama.cpp", "onnx": "ONNX Runtime"}
_LIBRARIES = ("llama-cpp-python", "onnxruntime")


@dataclass(frozen=True, kw_only=True)
class BackendRates:
    """Tokens per second, or per joule, to be expected of each backend with the policy's best rounds. `bundle` is its folder's name."""

    bundle: str
    rates: dict[BackendKind, float]

    @property
    def fastest(self) -> BackendKind:
        """The backend of the highest rate."""
        return max(self.rates, key=self.rates.__getitem__)

    def sentence(self) -> str:
        """What was found, for people."""
        best = self.fastest
        others = [f"{self.rates[best] / rate:.2f} times the speed of {WORDS[kind]}" for kind, rate in self.rates.items() if kind != best]
        return f"{WORDS[best]}, {', '.join(others)}" if others else f"{WORDS[best]}, the only one that opens it"


def measured_rates(
    bundle: str,
    facts: Sequence[object],
    kinds: Sequence[BackendKind],
    rate_of: Callable[[BackendKind], float],
    notify: Callable[[str], None],
) -> BackendRates:
    """Returns the cached rates of the bundle with these facts on this machine; without any, measures each of `kinds` by `rate_of`.

    Rates of a busy machine are used once and not kept. A backend that cannot open the bundle has no rate. Raises its error if that is so of
    all.
    """
    path = cache_folder() / CACHE_NAME
    everything = [cpu_identity(), variant(), *(installed_version(name) or "" for name in _LIBRARIES), *map(str, facts)]
    key = entry_key(everything)
    known = _read(read_entries(path).get(key))
    if known is not None and set(known.rates) <= set(kinds):
        return known
    notify("First use of this bundle on this machine: measuring which of its backends is faster.")
    rates: dict[BackendKind, float] = {}
    failure: EdgeRuntimeError | None = None
    check = QuietCheck("the backends' speeds", notify)
    for kind in kinds:
        try:
            rates[kind] = rate_of(kind)
        except EdgeRuntimeError as error:
            failure = failure or error
            notify(f"{WORDS[kind]} is left out: {error}.")
    if failure is not None and not rates:
        raise failure
    found = BackendRates(bundle=bundle, rates=rates)
    if check.passed():
        cache_put(path, key, {"bundle": bundle, "rates": rates})
    notify(f"Backend: {found.sentence()}; --backend takes the other one.")
    return found


def cached_choices() -> Iterator[BackendRates]:
    """Returns what was measured on this machine, or on another one with the same cache folder."""
    found = map(_read, read_entries(cache_folder() / CACHE_NAME).values())
    return (one for one in found if one is not None)


def _read(entry: object) -> BackendRates | None:
    if not isinstance(entry, dict) or not isinstance(rates := entry.get("rates"), dict) or not isinstance(entry.get("bundle"), str):
        return None
    sound = all(type(rate) is float and rate > 0 for rate in rates.values())
    if not rates or not sound or not set(rates) <= set(get_args(BackendKind)):
        return None
    return BackendRates(bundle=entry["bundle"], rates=rates)
