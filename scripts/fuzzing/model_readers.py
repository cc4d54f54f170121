"""Readers behind which C, C++ or Rust code stands: ggml, llama.cpp, onnxruntime, tokenizers; and the template sandbox."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from edge_runtime.bundle import Bundle, OnnxGraphs, open_bundle
from edge_runtime.errors import BackendError
from fuzzing.readers import PARSED, Read, Reader

_GRAPHS = OnnxGraphs(
    opset=23, contrib_ops=(), rotations=(), context=64, bos_token=2, eos_token=1, eog_tokens=(1,), control_tokens=(0, 1, 2, 3)
)  # fmt: skip
_VOCABULARY = 300
_TEXTS = ("def area(r):\n", "<|turn>user\n<eos>\u00e9\U0001f600 \x00", " " * 50)
# Sizes of the head file in the corpus (tests/support/tiny_head.py).
_HEAD = {"hidden_size": 32, "target_hidden_size": 64, "vocabulary": 30}


def _opened(bundle: Path | None) -> Bundle:
    assert bundle is not None
    return open_bundle(bundle)


def _mapped_head(folder: Path, _: Path | None) -> Read:
    from edge_runtime.backends.head_file import read_head
    from edge_runtime.backends.llama_library import library

    path = folder / "head.gguf"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        read_head(library(), path, **_HEAD)

    return read


def _header_of(bundle: Path) -> list[bytes]:
    """The target's header: everything before its first tensor's data."""
    path = _opened(bundle).path("target", "gguf")
    from edge_runtime.gguf_header import read_gguf_header

    start = min(tensor.offset for tensor in read_gguf_header(path).tensors)
    with path.open("rb") as file:
        return [file.read(start)]


def gguf_places(data: bytes) -> list[tuple[int, int]]:
    """Returns where in a sound GGUF header its keys and tensors lie; an array, be it a vocabulary, is one place, and its length another."""
    places, at = [(0, 24)], 24
    tensors, keys = struct.unpack_from("<QQ", data, 8)
    widths = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

    def string(at: int) -> int:
        return at + 8 + struct.unpack_from("<Q", data, at)[0]

    for _ in range(keys):
        begin, at = at, string(at)
        (kind,) = struct.unpack_from("<I", data, at)
        at += 4
        if kind == 8:
            at = string(at)
        elif kind == 9:
            inner, count = struct.unpack_from("<IQ", data, at)
            at += 12
            places.append((begin, at))
            begin = at
            for _ in range(count):
                at = string(at) if inner == 8 else at + widths[inner]
        else:
            at += widths[kind]
        places.append((begin, at))
    for _ in range(tensors):
        begin, at = at, string(at)
        (dimensions,) = struct.unpack_from("<I", data, at)
        at += 4 + 8 * dimensions + 12
        places.append((begin, at))
    return places


def _gguf_model(folder: Path, bundle: Path | None) -> Read:
    """The target with another header, opened and used for texts and one token; its data stays where it was."""
    from edge_runtime.backends.llama_context import LlamaOptions
    from edge_runtime.backends.llama_target import LlamaTarget

    source = _opened(bundle).path("target", "gguf").read_bytes()
    start = len(_header_of(bundle)[0]) if bundle else 0
    path = folder / "target.gguf"
    path.write_bytes(source)
    options = LlamaOptions(context=64, threads=1, batch=64, use_extra_bufts=False)

    def read(data: bytes) -> None:
        with path.open("r+b") as file:
            file.write(data[:start].ljust(start, b"\0"))
        with LlamaTarget(path, options) as target:
            for text in _TEXTS:
                for token in target.vocabulary.encode(text):
                    target.vocabulary.piece(token, special=True)
            target.verify([1])

    return read


def _onnx_model(folder: Path, _: Path | None) -> Read:
    from edge_runtime.backends.ort_library import Graph, SessionOptions
    from edge_runtime.onnx_header import check_onnx
    from fuzzing.runtime_readers import make_weights

    make_weights(folder)
    path, options = folder / "model.onnx", SessionOptions(threads=1)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        check_onnx(path)
        Graph(path, options)

    return read


def _tokenizer(folder: Path, _: Path | None) -> Read:
    from edge_runtime.backends.ort_vocabulary import TokenizerVocabulary

    path = folder / "tokenizer.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        vocabulary = TokenizerVocabulary(path, _GRAPHS, _VOCABULARY)
        for text in _TEXTS:
            for token in vocabulary.encode(text):
                if token < _VOCABULARY:
                    vocabulary.piece(token, special=True)

    return read


def _prompt(_: Path, bundle: Path | None) -> Read:
    """Any text to tokens and back, on both libraries; control tokens must not come from it."""
    from edge_runtime.backends.llama_context import LlamaOptions
    from edge_runtime.backends.llama_target import LlamaTarget
    from edge_runtime.backends.ort_vocabulary import TokenizerVocabulary

    opened = _opened(bundle)
    # Kept open for the whole campaign: the process ends with it.
    target = LlamaTarget(opened.path("target", "gguf"), LlamaOptions(context=64, threads=1, batch=64))
    control = frozenset(target.vocabulary.control_tokens.values())
    graphs = OnnxGraphs(
        opset=23, contrib_ops=(), rotations=(), context=64, bos_token=2, eos_token=1, eog_tokens=(1,),
        control_tokens=tuple(sorted(control)),
    )  # fmt: skip
    other = TokenizerVocabulary(opened.path("tokenizer"), graphs, opened.manifest.architecture.vocab_size)

    def read(data: bytes) -> None:
        text = data.decode("utf-8", "surrogateescape")
        for vocabulary in (target.vocabulary, other):
            tokens = vocabulary.encode(text, add_bos=False)
            for token in tokens:
                vocabulary.piece(token)
            if any(token < 4 for token in tokens):  # pad, eos, bos, unk: never from plain text
                raise AssertionError(f"control tokens in {tokens[:20]}")

    return read


def _template(_: Path, __: Path | None) -> Read:
    from edge_runtime.template_sandbox import FAILURES, compile_template

    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "tool_calls": []}]

    def read(data: bytes) -> None:
        try:
            render = compile_template(data.decode("utf-8", "replace"))
            render({"messages": messages, "bos_token": "<bos>", "eos_token": "<eos>", "add_generation_prompt": True, "tools": []})
        except FAILURES as error:
            raise BackendError(f"refused: {type(error).__name__}") from error

    return read


def _kv_state(_: Path, bundle: Path | None) -> Read:
    from edge_runtime.backends.llama_context import LlamaOptions
    from edge_runtime.backends.llama_target import LlamaTarget

    target = LlamaTarget(_opened(bundle).path("target", "gguf"), LlamaOptions(context=64, threads=1, batch=64, draft=False))

    def read(data: bytes) -> None:
        target.rollback(0)
        target.restore(list(range(5, 17)), data)
        target.verify([7])

    return read


def _states(bundle: Path) -> Sequence[bytes]:
    from edge_runtime.backends.llama_context import LlamaOptions
    from edge_runtime.backends.llama_target import LlamaTarget

    with LlamaTarget(_opened(bundle).path("target", "gguf"), LlamaOptions(context=64, threads=1, batch=64, draft=False)) as target:
        target.prefill(list(range(5, 17)))
        return [target.state()]


def _state_places(data: bytes) -> Sequence[tuple[int, int]]:
    """Headers: at the beginning, and after the full cache somewhere in the middle."""
    return [(0, 200), (0, len(data))]


READERS = (
    Reader(name="head-file", make=_mapped_head),
    # The input is the header only; the file has 80 times its bytes.
    Reader(name="gguf-model", make=_gguf_model, needs_bundle=True, seeds=_header_of, focus=gguf_places, memory_factor=160.0),
    Reader(name="onnx-model", make=_onnx_model, corpus="onnx", memory_factor=PARSED),
    Reader(name="tokenizer-library", make=_tokenizer, corpus="tokenizer", structured=True, memory_factor=PARSED),
    Reader(name="prompt", make=_prompt, needs_bundle=True, memory_factor=PARSED),
    Reader(name="chat-template", make=_template, guarded=False, memory_factor=PARSED),
    Reader(name="kv-state", make=_kv_state, needs_bundle=True, seeds=_states, focus=_state_places, memory_factor=8.0),
)  # fmt: skip
