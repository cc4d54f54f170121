"""Looks at a GGUF file before C code does: what our own reader refuses never reaches it, nor what llama.cpp ends the process for."""

from __future__ import annotations

from pathlib import Path

from edge_runtime.errors import BackendError
from edge_runtime.gguf_header import VOCABULARY_KEY, GgufError, GgufHeader, LongArray, read_gguf_header

# What edge-export writes: other architectures and tokenizers are code of llama.cpp that a bundle never needs.
ARCHITECTURES = ("gemma4", "gemma4-assistant")
TOKENIZERS = ("gemma4", "none")
# llama.cpp's LLAMA_MAX_LAYERS: it ends the process beyond it.
MOST_LAYERS = 512
# Four of Gemma 4's; without a tokenizer llama.cpp makes room for as many tokens as a file claims.
MOST_TOKENS = 1 << 20
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


def check_model(path: Path) -> GgufHeader:
    """Returns the header of a target or drafter. Raises BackendError as `check_gguf` does, or if it says what llama.cpp would end the
    process for."""
    header = check_gguf(path)
    if header.architecture not in ARCHITECTURES:
        raise BackendError(f"{path} has the architecture {header.architecture!r:.40}, not {' or '.join(ARCHITECTURES)}; check the path")
    _check_tokenizer(header)
    _check_layers(header)
    _check_heads(header)
    for tensor in header.tensors:
        # Norms and scales are added to and multiplied with float32 rows, for which llama.cpp's CPU has no other kernel.
        if len(tensor.shape) == 1 and tensor.type != FLOAT32:
            raise BackendError(f"{path}: {tensor.name!r:.80} is a vector that is not float32; export the bundle again")
    return header


def _check_tokenizer(header: GgufHeader) -> None:
    kind = header.keys.get("tokenizer.ggml.model")
    if kind not in TOKENIZERS:
        raise BackendError(f"{header.path} has the tokenizer {kind!r:.40}, not {' or '.join(TOKENIZERS)}; export the bundle again")
    claimed = header.keys.get(f"{header.architecture}.vocab_size", 0)
    if not (isinstance(claimed, int) and 0 <= claimed <= MOST_TOKENS):
        raise BackendError(f"{header.path} claims {claimed!s:.20} tokens, more than {MOST_TOKENS}; export the bundle again")
    tokens = header.keys.get(VOCABULARY_KEY)
    if isinstance(tokens, LongArray) and tokens.doubles:
        raise BackendError(f"{header.path}: {tokens.doubles} of its {tokens.length} tokens stand there twice; export the bundle again")


def _check_layers(header: GgufHeader) -> None:
    layers = header.keys.get(f"{header.architecture}.block_count", 1)
    if not (isinstance(layers, int) and 0 < layers <= MOST_LAYERS):
        raise BackendError(
            f"{header.path} says that it has {layers!s:.20} layers, llama.cpp takes 1 to {MOST_LAYERS}; export the bundle again"
        )


def _check_heads(header: GgufHeader) -> None:
    length = turned = None
    for kind in ("", "_swa"):  # what the sliding layers leave out is as in the others, and all of a head is rotated unless less is said
        length = header.keys.get(f"{header.architecture}.attention.key_length{kind}", length)
        turned = header.keys.get(f"{header.architecture}.rope.dimension_count{kind}", turned if turned is not None else length)
        if length is not None and not (isinstance(turned, int) and isinstance(length, int) and 0 <= turned <= length):
            raise BackendError(
                f"{header.path} rotates {turned!s:.20} of {length!s:.20} values of a head (rope.dimension_count{kind}); export the bundle again"
            )
