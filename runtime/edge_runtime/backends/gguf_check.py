"""Looks at a GGUF file before C code does: what our own reader refuses never reaches it."""

from __future__ import annotations

from pathlib import Path

from edge_runtime.errors import BackendError
from edge_runtime.gguf_header import GgufError, GgufHeader, read_gguf_header

# llama.cpp's LLAMA_MAX_LAYERS: it ends the process beyond it.
MOST_LAYERS = 512
# ggml's number of the type.
FLOAT32 = 0


def check_gguf(path: Path) -> GgufHeader:
    """Returns the header. Raises BackendError if `path` is no file, its header is not sound or does not fit its size, or says what
    llama.cpp would end the process for.
    """
    if not path.is_file():
        raise BackendError(f"{path} is not a file; check the path or export the bundle again")
    try:
        header = read_gguf_header(path)
    except GgufError as error:
        raise BackendError(f"{error}, or export the bundle again") from error
    _check_numbers(header)
    for tensor in header.tensors:
        # Norms and scales are added to and multiplied with float32 rows, for which llama.cpp's CPU has no other kernel.
        if header.architecture.startswith("gemma4") and len(tensor.shape) == 1 and tensor.type != FLOAT32:
            raise BackendError(f"{path}: {tensor.name!r:.80} is a vector that is not float32; export the bundle again")
    return header


def _check_numbers(header: GgufHeader) -> None:
    layers = header.keys.get(f"{header.architecture}.block_count", 1)
    if not (isinstance(layers, int) and 0 < layers <= MOST_LAYERS):
        raise BackendError(
            f"{header.path} says that it has {layers!s:.20} layers, llama.cpp takes 1 to {MOST_LAYERS}; export the bundle again"
        )
    length = turned = None
    for kind in ("", "_swa"):  # what the sliding layers leave out is as in the others, and all of a head is rotated unless less is said
        length = header.keys.get(f"{header.architecture}.attention.key_length{kind}", length)
        turned = header.keys.get(f"{header.architecture}.rope.dimension_count{kind}", turned if turned is not None else length)
        if length is not None and not (isinstance(turned, int) and isinstance(length, int) and 0 <= turned <= length):
            raise BackendError(
                f"{header.path} rotates {turned!s:.20} of {length!s:.20} values of a head (rope.dimension_count{kind}); export the bundle again"
            )
