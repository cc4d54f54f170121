"""The split drafter's body: the four blocks of a finished drafter GGUF, with their very bytes, in a file llama.cpp still takes for a drafter.

In place of the two projections there are selectors, which pass the first values of the embedding input to the first block and the
last block's output into the first values of the hidden row; in place of the vocabulary, a dummy one of 32 zero rows. The target's
own embedding, which llama.cpp adds for every token (src/models/gemma4-assistant.cpp), meets zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint import Checkpoint
from edge_export.errors import ExportError
from edge_export.gguf_file import RawTensor, write_raw_gguf
from edge_export.gguf_header import TensorInfo, read_gguf_header
from edge_export.gguf_metadata import Entry, architecture_entries, architecture_name

DUMMY_VOCABULARY = 32
# ggml's numbers
_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1}
_PIECE_BYTES = 4 << 20
_REPLACED = ("token_embd.weight", "nextn.pre_projection.weight", "nextn.post_projection.weight")


def write_body(drafter: Checkpoint, finished: Path, path: Path, progress: Callable[[int], None] = lambda _: None) -> None:
    """Writes `path` from `finished`, the drafter's GGUF as it goes into the bundle; `progress` gets the bytes written since its last call.

    Raises ExportError if `finished` does not hold what the checkpoint promises.
    """
    header = read_gguf_header(finished)
    model = drafter.assistant
    hidden, target = model.hidden_size, model.target_hidden_size
    missing = set(_REPLACED) - {tensor.name for tensor in header.tensors}
    if missing:
        raise ExportError(f"{finished} lacks {', '.join(sorted(missing))}; export it again")
    # float16, whose products with ones are exact: llama.cpp rounds what it multiplies to the weights' type, so a quantized selector would
    # cost precision, and a float32 one has twice the bytes to read.
    selectors: list[tuple[str, NDArray[Any]]] = [
        ("token_embd.weight", np.zeros((DUMMY_VOCABULARY, hidden), np.float32)),
        ("nextn.pre_projection.weight", np.eye(hidden, 2 * target, k=target, dtype=np.float16)),
        ("nextn.post_projection.weight", np.eye(target, hidden, dtype=np.float16)),
    ]
    tensors = [_own(name, values) for name, values in selectors]
    tensors += [_copied(finished, tensor) for tensor in header.tensors if tensor.name not in _REPLACED]
    name = architecture_name(model)
    entries: list[Entry] = architecture_entries(drafter, int(header.keys.get("general.file_type", 0)))
    entries += [(f"{name}.vocab_size", "uint32", DUMMY_VOCABULARY), ("tokenizer.ggml.model", "string", "none")]
    write_raw_gguf(path, name, entries, tensors, progress)


def _own(name: str, values: NDArray[Any]) -> RawTensor:
    return RawTensor(
        name=name, shape=values.shape, type=_TYPES[values.dtype], bytes=values.nbytes, pieces=lambda: iter([values.data.cast("B")])
    )


def _copied(source: Path, tensor: TensorInfo) -> RawTensor:
    def pieces() -> Iterator[Any]:
        with source.open("rb") as file:
            file.seek(tensor.offset)
            left = tensor.bytes
            while left:
                piece = file.read(min(left, _PIECE_BYTES))
                if not piece:
                    raise ExportError(f"{source} became shorter while it was read; export it again")
                left -= len(piece)
                yield piece

    return RawTensor(name=tensor.name, shape=tuple(reversed(tensor.shape)), type=tensor.type, bytes=tensor.bytes, pieces=pieces)
