"""The split drafter's head file: what the host computes while llama.cpp runs the four blocks alone. See docs/bundle.md.

Everything before and after the blocks is linear, so it may leave the model: z = W_x x + W_h h goes in, and the centroid head
(transformers, Gemma4AssistantMaskedEmbedder) works on what comes out. Output rows lie in cluster order, each cluster in one piece.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_export.architecture import AssistantArchitecture
from edge_export.checkpoint import Checkpoint
from edge_export.errors import CheckpointError
from edge_export.safetensors_file import ITEM_BYTES, READABLE, StoredTensor, read_chunks, read_float_chunks, widen
from edge_export.tensor_shapes import CENTROIDS, TOKEN_ORDERING

HEAD_FORMAT = "edge-mtp drafter head 1"
# The data begins at a multiple of this, so that it can be mapped as whole vectors.
_ALIGNMENT = 64
_CENTROIDS_PER_PIECE = 64


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[NDArray[Any]]]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def can_split(target_hidden_size: int, drafter: Checkpoint) -> bool:
    """Whether this drafter gives a split one: it has a centroid head, and its rows fit into the target-wide input that carries them."""
    return drafter.assistant.ordered_embeddings and drafter.assistant.hidden_size < target_hidden_size


def row_type(drafter: Checkpoint) -> str:
    """The type of the head's output rows: bfloat16 if the checkpoint's are, otherwise float32, so that nothing is lost."""
    return "bf16" if drafter.tensors["model.embed_tokens.weight"].dtype == "BF16" else "f32"


def head_bytes(drafter: Checkpoint) -> int:
    """Returns how many bytes write_head writes, to within a few hundred."""
    return sum(tensor.bytes for tensor in _shapes(drafter, None)) + 1024


def write_head(drafter: Checkpoint, path: Path, progress: Callable[[int], None] = lambda _: None) -> None:
    """Writes `path`, a safetensors file; `progress` gets the bytes written since its last call.

    Raises CheckpointError if the token order is no permutation, or the sizes do not divide.
    """
    ordering = token_order(drafter)
    tensors = _shapes(drafter, ordering)
    header: dict[str, Any] = {"__metadata__": {"format": HEAD_FORMAT, "top_centroids": str(drafter.assistant.top_centroids)}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.bytes]}
        offset += tensor.bytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for piece in tensor.pieces():
                progress(file.write(np.ascontiguousarray(piece).data.cast("B")))


def _shapes(drafter: Checkpoint, ordering: NDArray[np.int32] | None) -> list[_Tensor]:
    """The file's tensors in order, widest first; their pieces are there once `ordering` [vocabulary] is."""
    model, stored = drafter.assistant, drafter.tensors
    hidden, target = model.hidden_size, model.target_hidden_size
    clusters = (model.centroids, model.vocab_size // model.centroids)
    order = np.empty(0, np.int32) if ordering is None else ordering

    def input_half(begin: int) -> Iterator[NDArray[Any]]:
        yield _matrix(stored["pre_projection.weight"])[:, begin : begin + target]

    def feedback() -> Iterator[NDArray[Any]]:
        # In float64, so that the product is the float32 nearest to the two steps it replaces.
        halves = _matrix(stored["pre_projection.weight"])[:, target:], _matrix(stored["post_projection.weight"])
        yield (halves[0].astype(np.float64) @ halves[1].astype(np.float64)).astype(np.float32)

    return [
        _Tensor(name="rows", dtype=row_type(drafter).upper(), shape=(*clusters, hidden), pieces=lambda: _stored_rows(drafter, order)),
        _Tensor(name="token_ordering", dtype="I32", shape=clusters, pieces=lambda: iter([order])),
        _Tensor(name="centroids", dtype="F32", shape=(model.centroids, hidden), pieces=lambda: iter([_matrix(stored[CENTROIDS])])),
        _Tensor(name="embedding_projection", dtype="F32", shape=(hidden, target), pieces=lambda: input_half(0)),
        _Tensor(name="hidden_projection", dtype="F32", shape=(hidden, target), pieces=lambda: input_half(target)),
        _Tensor(name="feedback", dtype="F32", shape=(hidden, hidden), pieces=feedback),
    ]


def cluster_rows(drafter: Checkpoint, ordering: NDArray[np.int32]) -> Iterator[NDArray[np.float32]]:
    """Yields output rows [n, hidden] in cluster order as float32, a few clusters at a time."""
    dtype = drafter.tensors["model.embed_tokens.weight"].dtype
    for rows in _stored_rows(drafter, ordering):
        yield widen(rows, dtype) if dtype == "BF16" else rows


def _stored_rows(drafter: Checkpoint, ordering: NDArray[np.int32]) -> Iterator[NDArray[Any]]:
    """Output rows in cluster order, bfloat16 as its bits."""
    stored, model = drafter.tensors["model.embed_tokens.weight"], drafter.assistant
    # Mapped, because rows are wanted in another order than they lie: the page cache holds what memory has room for.
    table = np.memmap(stored.path, np.dtype(READABLE[stored.dtype]), "r", stored.offset, stored.shape)
    step = _CENTROIDS_PER_PIECE * (model.vocab_size // model.centroids)
    for first in range(0, len(ordering), step):
        rows = table[ordering[first : first + step]]
        yield rows if stored.dtype == "BF16" else widen(rows, stored.dtype)


def token_order(drafter: Checkpoint) -> NDArray[np.int32]:
    """Returns the tokens [vocabulary] in cluster order. Raises CheckpointError if that is no permutation, or the sizes do not divide."""
    model, stored = drafter.assistant, drafter.tensors[TOKEN_ORDERING]
    _check_sizes(drafter, model)
    order = np.concatenate([np.array(piece) for piece in read_chunks(stored)])
    if not np.array_equal(np.sort(order), np.arange(model.vocab_size)):
        raise CheckpointError(f"{stored.path}: {stored.name!r} does not name every token once; download the checkpoint again")
    return order.astype(np.int32)


def _check_sizes(drafter: Checkpoint, model: AssistantArchitecture) -> None:
    if model.vocab_size % model.centroids or model.top_centroids > model.centroids:
        sizes = f"{model.vocab_size} tokens, {model.centroids} centroids and the best {model.top_centroids} of them"
        raise CheckpointError(f"{drafter.folder}: {sizes} do not fit together; use an unmodified config")


def _matrix(stored: StoredTensor) -> NDArray[np.float32]:
    values = [np.array(piece) for piece in read_float_chunks(stored, "f32")]
    return np.concatenate(values).reshape(stored.shape)
