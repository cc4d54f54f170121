"""Cached acceptance counts of a pair, from the export and from earlier uses on this machine. Counts per confidence bin, no text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from edge_devices.files.user_cache import cache_put, entry_key, read_entries
from edge_runtime.calibration.measured import cache_file
from edge_runtime.drafting.acceptance_model import EXPORTED_WEIGHT, AcceptanceModel


def exported_counts(parity: object) -> object:
    """Returns the counts of drafts that an export measured and noted in a bundle; None without any."""
    drafts = parity.get("drafts") if isinstance(parity, dict) else None
    return drafts.get("confidence") if isinstance(drafts, dict) else None


class AcceptanceCache:
    """The cached counts of one pair and drafter, shared by all sessions on it. `facts` identify the pair and drafter."""

    def __init__(self, facts: Sequence[object], exported: object = None) -> None:
        """`exported` are the counts in the bundle, where the first use begins."""
        self._exported = exported
        self._path, self._name = cache_file(), f"drafts {entry_key([*map(str, facts)])}"

    @cached_property
    def model(self) -> AcceptanceModel:
        """The model of all earlier uses. Missing or damaged counts are not trusted: then the exported ones or the prior count."""
        cached = AcceptanceModel.from_json(read_entries(self._path).get(self._name))
        return cached or AcceptanceModel.from_json(self._exported, EXPORTED_WEIGHT) or AcceptanceModel()

    def save(self) -> None:
        """Caches what was learned; if the file cannot be written, the next use learns again."""
        if "model" in self.__dict__ and self.model.observed:
            cache_put(self._path, self._name, self.model.to_json())
