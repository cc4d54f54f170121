"""What stands in the place of an opened target where only its files' readers are meant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.base import Logits
from edge_runtime.backends.llama_state import check_state
from edge_runtime.bundle import Bundle, open_bundle
from fuzzing.readers import corpus

WINDOW = 8


class StateTarget:
    """A target that takes any sound state. Implements `backends.base.SavableTarget`."""

    context = 64
    rewind_slack = 12
    rollback_floor = 0
    kv_type = "f16"
    length = 0
    tokens: NDArray[np.int32] = np.zeros(0, np.int32)

    def state(self) -> bytes:
        """There is none."""
        return b""

    def restore(self, tokens: Sequence[int], state: bytes) -> None:
        """Checks the state as the llama.cpp backend does."""
        check_state(state, len(tokens), WINDOW)

    def prefill(self, tokens: Sequence[int]) -> None:
        """Nobody asks."""

    def verify(self, tokens: Sequence[int]) -> Logits:
        """Nobody asks."""
        return np.zeros((len(tokens), 1), np.float32)

    def rollback(self, length: int) -> None:
        """Nobody asks."""

    def close(self) -> None:
        """Nothing is open."""


def bundle_of(folder: Path) -> Bundle:
    """Returns the corpus's bundle, whose target the corpus's states are of."""
    home = folder / "bundle"
    home.mkdir()
    (home / "manifest.json").write_bytes(corpus("manifest")[0])
    from fuzzing.runtime_readers import DUMMIES

    for name, content in DUMMIES.items():
        (home / name).write_bytes(content)
    return open_bundle(home)
