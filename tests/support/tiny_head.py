"""Small head files for the split drafter, written by hand: right by default, wrong as asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.backends.head_file import HEAD_FORMAT

CENTROIDS, PER_CENTROID, HIDDEN, TARGET, TOP = 6, 5, 4, 10, 2
VOCABULARY = CENTROIDS * PER_CENTROID
SIZES: dict[str, int] = {"hidden_size": HIDDEN, "target_hidden_size": TARGET, "vocabulary": VOCABULARY}
NAMES = {np.dtype(np.float32): "F32", np.dtype(np.uint16): "BF16", np.dtype(np.int32): "I32", np.dtype(np.int64): "I64"}


def head_arrays(seed: int = 0, *, bfloat16: bool = False) -> dict[str, Any]:
    """The tensors of a random head, in the order of the file."""
    random = np.random.default_rng(seed)

    def floats(*shape: int) -> Any:
        return random.normal(size=shape).astype(np.float32)

    rows = floats(CENTROIDS, PER_CENTROID, HIDDEN)
    return {
        "rows": (rows.view(np.uint32) >> 16).astype(np.uint16) if bfloat16 else rows,
        "token_ordering": random.permutation(VOCABULARY).astype(np.int32).reshape(CENTROIDS, PER_CENTROID),
        "centroids": floats(CENTROIDS, HIDDEN),
        "embedding_projection": floats(HIDDEN, TARGET),
        "hidden_projection": floats(HIDDEN, TARGET),
        "feedback": floats(HIDDEN, HIDDEN),
    }


def head_header(arrays: dict[str, Any], top: str = str(TOP)) -> dict[str, Any]:
    """The header that belongs to `arrays`."""
    header: dict[str, Any] = {"__metadata__": {"format": HEAD_FORMAT, "top_centroids": top}}
    offset = 0
    for name, array in arrays.items():
        header[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    return header


def write_head_file(path: Path, arrays: dict[str, Any], header: dict[str, Any] | None = None) -> Path:
    """Writes a head file; `header` replaces the one that belongs to the arrays."""
    text = json.dumps(head_header(arrays) if header is None else header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in arrays.values()))
    return path
