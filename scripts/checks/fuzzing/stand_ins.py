"""Stand-ins for an opened target and its files, to fuzz readers without a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_runtime.errors import RequestError
from edge_runtime.interfaces import KvRows, Logits
from fuzzing.readers import CORPUS

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
    row_bytes = (16, 8)
    sliding_rows = WINDOW
    length = 0
    tokens: NDArray[np.int32] = np.zeros(0, np.int32)

    def state(self, first: int = 0) -> KvRows:  # noqa: ARG002
        """Returns an empty state."""
        return KvRows(np.zeros((0, 16), np.uint8), np.zeros((0, 8), np.uint8))

    def restore(self, tokens: Sequence[int], rows: KvRows) -> None:
        """Checks the number of rows."""
        if len(rows.full) != len(tokens) or not min(len(tokens), WINDOW) <= len(rows.sliding) <= len(tokens):
            raise RequestError("the state has too few rows")

    def prefill(self, tokens: Sequence[int]) -> None:
        """Does nothing."""

    def verify(self, tokens: Sequence[int]) -> Logits:
        """Returns logits of zero."""
        return np.zeros((len(tokens), 1), np.float32)

    def rollback(self, length: int) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def make_weights(folder: Path) -> None:
    """Writes the weight files of the corpus's graphs, as sparse files."""
    for name, size in json.loads((CORPUS / "onnx-data.json").read_text()).items():
        with (folder / name).open("wb") as file:
            file.truncate(size)
