"""Stand-ins for an opened target and its files, to fuzz readers without a model."""

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
# Content of the files named in the manifests of the corpus.
DUMMIES = {
    "target.gguf": b"t" * 11,
    "drafter.gguf": b"d" * 7,
    "tokenizer.json": b"{}",
    "weights.onnx_data": b"w" * 64,
    "target.onnx": b"g" * 5,
}


class StateTarget:
    """A target that accepts any valid state. Implements `interfaces.SavableTarget`."""

    context = 64
    rewind_slack = 12
    rollback_floor = 0
    kv_type = "f16"
    length = 0
    tokens: NDArray[np.int32] = np.zeros(0, np.int32)

    def state(self) -> bytes:
        """Returns an empty state."""
        return b""

    def restore(self, tokens: Sequence[int], state: bytes) -> None:
        """Checks the state as the llama.cpp backend does."""
        check_state(state, len(tokens), WINDOW)

    def prefill(self, tokens: Sequence[int]) -> None:
        """Does nothing."""

    def verify(self, tokens: Sequence[int]) -> Logits:
        """Returns logits of zero."""
        return np.zeros((len(tokens), 1), np.float32)

    def rollback(self, length: int) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def bundle_of(folder: Path) -> Bundle:
    """Returns a bundle of the corpus's manifest, to whose target the states of the corpus belong."""
    home = folder / "bundle"
    home.mkdir()
    (home / "manifest.json").write_bytes(corpus("manifest")[0])
    for name, content in DUMMIES.items():
        (home / name).write_bytes(content)
    return open_bundle(home)


def make_weights(folder: Path) -> None:
    """Writes the weight files of the corpus's graphs, as sparse files."""
    for name, size in json.loads((CORPUS / "onnx-data.json").read_text()).items():
        with (folder / name).open("wb") as file:
            file.truncate(size)
