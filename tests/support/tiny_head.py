"""Small head files written by hand: valid by default, damaged on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

CENTROIDS, PER_CENTROID, HIDDEN, TOP = 6, 5, 32, 2
VOCABULARY = CENTROIDS * PER_CENTROID
SIZES: dict[str, int] = {"hidden_size": HIDDEN, "vocabulary": VOCABULARY}
KEYS: dict[str, Any] = {"drafter_head.format": 3, "drafter_head.top_centroids": TOP}


def head_arrays(seed: int = 0) -> dict[str, Any]:
    """The tensors of a random head, in the order of the file; rows and matrices are multiples of 1/8, which are exact in float16."""
    random = np.random.default_rng(seed)

    def halves(*shape: int) -> Any:
        return (np.round(8 * random.normal(size=shape)) / 8).astype(np.float16)

    return {
        "rows": halves(CENTROIDS, PER_CENTROID, HIDDEN),
        "token_ordering": random.permutation(VOCABULARY).astype(np.int32).reshape(CENTROIDS, PER_CENTROID),
        "centroids": halves(CENTROIDS, HIDDEN),
    }


def write_head_file(path: Path, arrays: dict[str, Any], keys: dict[str, Any] | None = None, rows: str = "F16") -> Path:
    """Writes a head file; `keys` replace KEYS, `rows` the ggml type of the rows."""
    return write_tensors(path, arrays, KEYS if keys is None else keys, {"rows": rows})


def write_tensors(path: Path, arrays: dict[str, Any], keys: dict[str, Any], types: dict[str, str]) -> Path:
    """Writes a GGUF; `types` gives the ggml type of tensors whose type differs from their array's."""
    writer = gguf.GGUFWriter(path, "edge-mtp-drafter-head")
    for key, value in keys.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_string)(key, value)
    for name, array in arrays.items():
        kind = gguf.GGMLQuantizationType[types[name]] if name in types else None
        data = array if kind is None else gguf.quants.quantize(array.astype(np.float32), kind)
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
