"""What is known of a pair's drafts: from the export, then from one use on a machine to the next. Counts of how sure the drafter was and
what stood, no text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from edge_devices.files.user_cache import cache_folder, cache_put, read_entries
from edge_runtime.drafting.acceptance_model import EXPORTED_WEIGHT, AcceptanceModel

CACHE_NAME = "drafts.json"


class AcceptanceCache:
    """The memory of one pair and drafter, which all sessions on it share. `facts` tell the pair and drafter from all others."""

    def __init__(self, facts: Sequence[object], folder: Path | None = None, exported: object = None) -> None:
        """`folder` None is this machine's one; `exported` is what the bundle says, which the first use begins with."""
        self._exported = exported
        self._path = (folder or cache_folder()) / CACHE_NAME
        self._key = hashlib.sha256(json.dumps([*map(str, facts)]).encode()).hexdigest()

    @cached_property
    def model(self) -> AcceptanceModel:
        """What was learned up to now. Of what is missing or damaged nothing is believed."""
        recalled = AcceptanceModel.from_json(read_entries(self._path).get(self._key))
        return recalled or AcceptanceModel.from_json(self._exported, EXPORTED_WEIGHT) or AcceptanceModel()

    def save(self) -> None:
        """Remembers what was learned since; where that cannot be written, the next use learns anew."""
        if "model" in self.__dict__ and self.model.observed:
            cache_put(self._path, self._key, self.model.to_json())
