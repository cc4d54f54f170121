"""The split drafter's body: the four blocks of an exported drafter GGUF, byte for byte, in a file that llama.cpp loads as a drafter.

The pre-projection is replaced by a selector, which passes the first values of the embedding input to the first block: the target's own
embedding, which llama.cpp adds for every token (src/models/gemma4-assistant.cpp), is multiplied by zeros. The vocabulary is replaced by
an identity, so that the logits are the last block's normed output. The post-projection is not used then, and is zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.gguf_source import read_gguf_header
from edge_export.errors import ExportError
from edge_export.gguf.metadata import Entry, architecture_entries, architecture_name
from edge_export.gguf.writer import RawTensor, raw_tensor, write_raw_gguf
from edge_runtime.bundle.gguf_header import TensorInfo
from edge_runtime.bundle.gguf_types import FLOATS, TENSOR_TYPES

_PIECE_BYTES = 4 << 20
_PRE, _POST = "nextn.pre_projection.weight", "nextn.post_projection.weight"
_REPLACED = ("token_embd.weight", _PRE, _POST)


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
        raw_tensor("token_embd.weight", np.eye(hidden, dtype=np.float32), "f16"),
        raw_tensor(_PRE, np.eye(hidden, 2 * target, k=target, dtype=np.float32), _small(types[_PRE])),
        raw_tensor(_POST, np.zeros((target, hidden), np.float32), _small(types[_POST])),
    ]
    tensors += [_copied(finished, tensor) for tensor in header.tensors if tensor.name not in _REPLACED]
    name = architecture_name(model)
    entries: list[Entry] = architecture_entries(drafter, int(header.keys.get("general.file_type", 0)))
    entries += [(f"{name}.vocab_size", "uint32", hidden), ("tokenizer.ggml.model", "string", "none")]
    write_raw_gguf(path, name, entries, tensors, progress)


def _small(replaced: int) -> Literal["f16", "q4_0"]:
    """The type for the replacement of a matrix: q4_0, which stores ones and zeros exactly, if the matrix was quantized."""
    return "f16" if TENSOR_TYPES[replaced].name in FLOATS else "q4_0"


def _copied(source: Path, tensor: TensorInfo) -> RawTensor:
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

    return RawTensor(name=tensor.name, shape=tuple(reversed(tensor.shape)), type=tensor.type, bytes=tensor.bytes, pieces=pieces)
