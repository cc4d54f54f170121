"""The split drafter: a body that llama.cpp runs, and a head file, what the host computes meanwhile. See docs/bundle.md.

The body has the four blocks of an exported drafter GGUF, byte for byte, in a file that llama.cpp loads as a drafter. The pre-projection is
replaced by a selector, which passes the first values of the embedding input to the first block: the target's own embedding, which
llama.cpp adds for every token (src/models/gemma4-assistant.cpp), is multiplied by zeros. The vocabulary is replaced by an identity, so
that the logits are the last block's normed output. The post-projection is not used then, and is zeros.

Everything before and after the blocks is linear, so the host can compute it: z = W_x x + W_h h is the input, and the centroid head
(transformers, Gemma4AssistantMaskedEmbedder) is applied to the output. Output rows have the bytes of the exported drafter, in cluster
order, each cluster contiguous.
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
from edge_export.gguf.keys import Entry, architecture_entries, architecture_name
from edge_export.gguf.writer import GgufTensor, array_tensor, write_raw_gguf
from edge_runtime.bundle.gguf_header import TensorInfo
from edge_runtime.bundle.gguf_types import FLOATS, TENSOR_TYPES

HEAD_ARCHITECTURE, HEAD_FORMAT = "edge-mtp-drafter-head", 2
_CENTROIDS_PER_PIECE = 64
_MAX_FLOAT16 = float(np.finfo(np.float16).max)
_PIECE_BYTES = 4 << 20
_PRE, _POST = "nextn.pre_projection.weight", "nextn.post_projection.weight"
_ROWS = "token_embd.weight"
_REPLACED = (_ROWS, _PRE, _POST)


def can_split(target_hidden_size: int, drafter: Checkpoint) -> bool:
    """Whether this drafter can be split: it has a centroid head, and its rows fit into the input, which is as wide as the target's."""
    return drafter.assistant.ordered_embeddings and drafter.assistant.hidden_size < target_hidden_size


def head_bytes(drafter: Checkpoint, row_bytes: int) -> int:
    """Returns the size of the head file to within a few kB; `row_bytes` is the size of an output row of the exported drafter."""
    model = drafter.assistant
    hidden = model.hidden_size
    matrices = hidden * (model.centroids + 2 * model.target_hidden_size + hidden)
    return model.vocab_size * (row_bytes + 4) + 2 * matrices + 1024


def write_head(drafter: Checkpoint, finished: Path, path: Path, progress: Callable[[int], None] = lambda _: None) -> None:
    """Writes `path` from the checkpoint and `finished`, the bundle's drafter GGUF.

    `progress` gets the bytes written since its last call. Raises CheckpointError if the token order is not a permutation, the sizes do not
    divide, or a value is beyond float16; ExportError if `finished` has no output rows.
    """
    ordering, model, stored = token_order(drafter), drafter.assistant, drafter.tensors
    clusters = ordering.reshape(model.centroids, -1)
    pre, post = read_values(stored["pre_projection.weight"]), read_values(stored["post_projection.weight"])
    halves = pre[:, : model.target_hidden_size], pre[:, model.target_hidden_size :]
    # In float64, as the product replaces two steps.
    feedback = halves[1].astype(np.float64) @ post.astype(np.float64)
    tensors = [
        _clustered(output_rows(finished), finished, clusters),
        array_tensor("token_ordering", clusters.shape, "i32", lambda: clusters),
        _half("centroids", read_values(stored[CENTROIDS]), drafter),
        _half("embedding_projection", halves[0], drafter),
        _half("hidden_projection", halves[1], drafter),
        _half("feedback", feedback, drafter),
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


def write_body(drafter: Checkpoint, finished: Path, path: Path, progress: Callable[[int], None] = lambda _: None) -> None:
    """Writes `path` from `finished`, the bundle's drafter GGUF; `progress` gets the bytes written since its last call.

    Raises ExportError if `finished` lacks a tensor of the checkpoint.
    """
    header = read_gguf_header(finished)
    model = drafter.assistant
    hidden, target = model.hidden_size, model.target_hidden_size
    types = {tensor.name: tensor.type for tensor in header.tensors}
    missing = set(_REPLACED) - set(types)
    if missing:
        raise ExportError(f"{finished} lacks {', '.join(sorted(missing))}; export it again")
    # The output is float16, whose products with ones are exact: llama.cpp rounds activations to the weights' type. Quantized blocks
    # round their input anyway, so before them the selector may be quantized too, to a quarter of the bytes.
    tensors = [
        array_tensor(_ROWS, (hidden, hidden), "f16", lambda: np.eye(hidden, dtype=np.float32)),
        array_tensor(_PRE, (hidden, 2 * target), _small(types[_PRE]), lambda: np.eye(hidden, 2 * target, k=target, dtype=np.float32)),
        array_tensor(_POST, (target, hidden), _small(types[_POST]), lambda: np.zeros((target, hidden), np.float32)),
    ]
    tensors += [_copied(finished, tensor) for tensor in header.tensors if tensor.name not in _REPLACED]
    name = architecture_name(model)
    entries: list[Entry] = architecture_entries(drafter, int(header.keys.get("general.file_type", 0)))
    entries += [(f"{name}.vocab_size", "uint32", hidden), ("tokenizer.ggml.model", "string", "none")]
    write_raw_gguf(path, name, entries, tensors, progress)


def _small(replaced: int) -> str:
    """The type for the replacement of a matrix: q4_0, which stores ones and zeros exactly, if the matrix was quantized."""
    return "f16" if TENSOR_TYPES[replaced].name in FLOATS else "q4_0"


def _copied(source: Path, tensor: TensorInfo) -> GgufTensor:
    def pieces() -> Iterator[Any]:
        with source.open("rb") as file:
            file.seek(tensor.offset)
            left = tensor.bytes
            while left:
                piece = file.read(min(left, _PIECE_BYTES))
                if not piece:
                    raise ExportError(f"{source} became shorter while it was read; export the pair again")
                left -= len(piece)
                yield piece

    return GgufTensor(name=tensor.name, shape=tuple(reversed(tensor.shape)), type=tensor.type, pieces=pieces)
