"""The file of a drafter's sparse head (transformers, Gemma4AssistantMaskedEmbedder). See docs/design/manifest.md.

Output rows have the bytes of the exported drafter, in cluster order, each cluster contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.architecture import CENTROIDS, TOKEN_ORDERING, AssistantArchitecture
from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.gguf_source import read_gguf_header
from edge_export.checkpoint.safetensors import read_values
from edge_export.errors import CheckpointError, ExportError
from edge_export.gguf.keys import Entry
from edge_export.gguf.writer import GgufTensor, array_tensor, write_raw_gguf
from edge_runtime.bundle.gguf_header import TensorInfo

HEAD_ARCHITECTURE, HEAD_FORMAT = "edge-mtp-drafter-head", 3
_CENTROIDS_PER_PIECE = 64
_MAX_FLOAT16 = float(np.finfo(np.float16).max)
_ROWS = "token_embd.weight"


def head_bytes(drafter: Checkpoint, row_bytes: int) -> int:
    """Returns the size of the head file to within a few kB; `row_bytes` is the size of an output row of the exported drafter."""
    model = drafter.assistant
    return model.vocab_size * (row_bytes + 4) + 2 * model.hidden_size * model.centroids + 1024


def write_head(drafter: Checkpoint, finished: Path, path: Path, progress: Callable[[int], None] = lambda _: None) -> None:
    """Writes `path` from the checkpoint and `finished`, the bundle's drafter GGUF.

    `progress` gets the bytes written since its last call. Raises CheckpointError if the token order is not a permutation, the sizes do not
    divide, or a value is beyond float16; ExportError if `finished` has no output rows.
    """
    ordering, model, stored = token_order(drafter), drafter.assistant, drafter.tensors
    clusters = ordering.reshape(model.centroids, -1)
    tensors = [
        _clustered(output_rows(finished), finished, clusters),
        array_tensor("token_ordering", clusters.shape, "i32", lambda: clusters),
        _half("centroids", read_values(stored[CENTROIDS]), drafter),
    ]
    entries: list[Entry] = [("drafter_head.format", "uint32", HEAD_FORMAT), ("drafter_head.top_centroids", "uint32", model.top_centroids)]
    write_raw_gguf(path, HEAD_ARCHITECTURE, entries, tensors, progress)


def output_rows(finished: Path) -> TensorInfo:
    """The exported drafter's output rows. Raises ExportError if it has none."""
    for tensor in read_gguf_header(finished).tensors:
        if tensor.name == _ROWS:
            return tensor
    raise ExportError(f"{finished} lacks {_ROWS}; export it again")


def _clustered(rows: TensorInfo, finished: Path, ordering: NDArray[np.int32]) -> GgufTensor:
    """Output rows in cluster order, a few clusters at a time: `ordering` is [centroids, tokens of each]."""
    hidden, count = rows.shape
    centroids, per_centroid = ordering.shape

    def pieces() -> Iterator[Any]:
        # Mapped, as rows are read in another order than they are stored; the page cache holds as many as fit into memory.
        table = np.memmap(finished, np.uint8, "r", rows.offset, (count, rows.bytes // count))
        for first in range(0, centroids, _CENTROIDS_PER_PIECE):
            yield np.ascontiguousarray(table[ordering[first : first + _CENTROIDS_PER_PIECE].reshape(-1)]).data.cast("B")

    return GgufTensor(name="rows", shape=(centroids, per_centroid, hidden), type=rows.type, pieces=pieces)


def _half(name: str, values: NDArray[Any], drafter: Checkpoint) -> GgufTensor:
    """A matrix as float16, which is exact for bfloat16 values of at least 2^-14."""
    if not np.abs(values).max() <= _MAX_FLOAT16:
        raise CheckpointError(f"{drafter.folder}: {name} holds values beyond float16's {_MAX_FLOAT16:.0f}; download the checkpoint again")
    return array_tensor(name, values.shape, "f16", lambda: values)


def token_order(drafter: Checkpoint) -> NDArray[np.int32]:
    """Returns the tokens [vocabulary] in cluster order. Raises CheckpointError if it is not a permutation, or the sizes do not divide."""
    model, stored = drafter.assistant, drafter.tensors[TOKEN_ORDERING]
    _check_sizes(drafter, model)
    order = read_values(stored)
    if not np.array_equal(np.sort(order), np.arange(model.vocab_size)):
        raise CheckpointError(f"{stored.path}: {stored.name!r} does not name every token once; download the checkpoint again")
    return order.astype(np.int32)


def _check_sizes(drafter: Checkpoint, model: AssistantArchitecture) -> None:
    if model.vocab_size % model.centroids or model.top_centroids > model.centroids:
        sizes = f"{model.vocab_size} tokens, {model.centroids} centroids and the best {model.top_centroids} of them"
        raise CheckpointError(f"{drafter.folder}: {sizes} do not match; use an unmodified config")
