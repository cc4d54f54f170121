"""What stands in the place of an opened target where only its files' readers are meant."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.llama.state_check import check_state
from edge_runtime.bundle.bundle import Bundle, open_bundle
from edge_runtime.interfaces import Logits
from fuzzing.readers import CORPUS, corpus

WINDOW = 8
# Files that manifests of the corpus name, and their content.
DUMMIES = {
    "target.gguf": b"t" * 11,
    "drafter.gguf": b"d" * 7,
    "tokenizer.json": b"{}",
    "weights.onnx_data": b"w" * 64,
    "target.onnx": b"g" * 5,
}


class StateTarget:
    """A target that takes any sound state. Implements `interfaces.SavableTarget`."""

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
    for name, content in DUMMIES.items():
        (home / name).write_bytes(content)
    return open_bundle(home)


def make_weights(folder: Path) -> None:
    """Makes the files, without content, from which the graphs of the corpus take their weights."""
    for name, size in json.loads((CORPUS / "onnx-data.json").read_text()).items():
        with (folder / name).open("wb") as file:
            file.truncate(size)
