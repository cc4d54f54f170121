"""Looks at a GGUF file before C code does: what our own reader refuses never reaches it, nor what llama.cpp ends the process for."""

from __future__ import annotations

from pathlib import Path

from edge_runtime.bundle.gguf_gemma4 import check_gemma4
from edge_runtime.bundle.gguf_header import VOCABULARY_KEY, GgufError, GgufHeader, LongArray, read_gguf_header
from edge_runtime.errors import BackendError

# What edge-export writes: other tokenizers, like other architectures, are code of llama.cpp that a bundle never needs.
TOKENIZERS = ("gemma4", "none")
# ggml's number of the type.
FLOAT32 = 0


def check_gguf(path: Path) -> GgufHeader:
    """Returns the header. Raises BackendError if `path` is no file, or its header is not sound or does not fit its size."""
    if not path.is_file():
        raise BackendError(f"{path} is not a file; check the path or export the bundle again")
    try:
        return read_gguf_header(path)
    except GgufError as error:
        raise BackendError(f"{error}, or export the bundle again") from error


def check_model(path: Path, architecture: str) -> GgufHeader:
    """Returns the header of a model. Raises BackendError as `check_gguf` does, for another architecture, or if the header says what
    llama.cpp would end the process for."""
    header = check_gguf(path)
    if header.architecture != architecture:
        raise BackendError(
            f"{path.name} has the architecture {header.architecture!r:.40}, not {architecture!r}; give the files of an exported bundle"
        )
    _check_tokenizer(header)
    check_gemma4(header)
    for tensor in header.tensors:
        # Norms and scales are added to and multiplied with float32 rows, for which llama.cpp's CPU has no other kernel.
        if len(tensor.shape) == 1 and tensor.type != FLOAT32:
            raise BackendError(f"{path}: {tensor.name!r:.80} is a vector that is not float32; export the bundle again")
    return header


def _check_tokenizer(header: GgufHeader) -> None:
    kind = header.keys.get("tokenizer.ggml.model")
    if kind not in TOKENIZERS:
        raise BackendError(f"{header.path} has the tokenizer {kind!r:.40}, not {' or '.join(TOKENIZERS)}; export the bundle again")
    tokens = header.keys.get(VOCABULARY_KEY)
    if isinstance(tokens, LongArray) and tokens.doubles:
        raise BackendError(f"{header.path}: {tokens.doubles} of its {tokens.length} tokens stand there twice; export the bundle again")
