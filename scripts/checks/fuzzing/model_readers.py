"""Readers behind which C, C++ or Rust code stands: ggml, llama.cpp, onnxruntime, tokenizers; and chat templates in their child.

Whole GGUF models are in gguf_readers.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from edge_runtime.backends.llama.context import LlamaOptions
from edge_runtime.backends.llama.drafter import read_head
from edge_runtime.backends.llama.target import LlamaTarget
from edge_runtime.backends.onnx.devices import Graph, SessionOptions
from edge_runtime.backends.onnx.target import TokenizerVocabulary
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.manifest import OnnxGraphs
from edge_runtime.bundle.onnx_graph import check_onnx
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.interfaces import KvRows
from edge_runtime.text.template_renderer import Renderer, TemplateError
from fuzzing.readers import PARSED, Read, Reader
from fuzzing.runtime_readers import make_weights

_GRAPHS = OnnxGraphs(
    opset=23, contrib_ops=(), rotations=(), context=64, bos_token=2, eos_token=1, eog_tokens=(1,), control_tokens=(0, 1, 2, 3)
)
_VOCABULARY = 300
_STATE_ROWS = 12
TEXTS = ("def area(r):\n", "<|turn>user\n<eos>\u00e9\U0001f600 \x00", " " * 50)
# Sizes of the head file in the corpus (tests/runtime/backends/llama/test_drafter_files.py).
_HEAD = {"hidden_size": 32, "vocabulary": 30}


def opened_target(bundle: Bundle, *, draft: bool = True) -> LlamaTarget:
    """The bundle's target. Readers keep it open for the whole campaign: the process ends with it."""
    return LlamaTarget(bundle.path("target", "gguf"), LlamaOptions(context=64, threads=1, batch=64, draft=draft))


def _mapped_head(folder: Path, _: object) -> Read:
    path = folder / "head.gguf"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        read_head(path, **_HEAD)

    return read


def _onnx_model(folder: Path, _: object) -> Read:
    make_weights(folder)
    path, options = folder / "model.onnx", SessionOptions(threads=1)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        check_onnx(path)
        Graph(path, options)

    return read


def _tokenizer(folder: Path, _: object) -> Read:
    path = folder / "tokenizer.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        vocabulary = TokenizerVocabulary(path, _GRAPHS, _VOCABULARY)
        for text in TEXTS:
            for token in vocabulary.encode(text):
                if token < _VOCABULARY:
                    vocabulary.piece(token, special=True)

    return read


def _prompt(_: Path, bundle: Bundle) -> Read:
    """Any text to tokens and back, on both libraries; control tokens must not come from it."""
    target = opened_target(bundle)
    graphs = replace(_GRAPHS, control_tokens=tuple(sorted(target.vocabulary.control_tokens.values())))
    other = TokenizerVocabulary(bundle.path("tokenizer"), graphs, bundle.manifest.architecture.vocab_size)

    def read(data: bytes) -> None:
        text = data.decode("utf-8", "surrogateescape")
        for vocabulary in (target.vocabulary, other):
            tokens = vocabulary.encode(text, add_bos=False)
            for token in tokens:
                vocabulary.piece(token)
            if any(token < 4 for token in tokens):  # pad, eos, bos, unk: never from plain text
                raise AssertionError(f"control tokens in {tokens[:20]}")

    return read


def _template(_: Path, __: object) -> Read:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "tool_calls": []}]

    def read(data: bytes) -> None:
        try:
            renderer = Renderer(data.decode("utf-8", "replace"))
            renderer.render({"messages": messages, "bos_token": "<bos>", "eos_token": "<eos>", "add_generation_prompt": True, "tools": []})
        except TemplateError as error:
            raise BackendError(f"refused: {error}") from error

    return read


def _kv_state(_: Path, bundle: Bundle) -> Read:
    target = opened_target(bundle, draft=False)
    full, sliding = (_STATE_ROWS * size for size in target.row_bytes)

    def read(data: bytes) -> None:
        target.rollback(0)
        values = np.frombuffer(data, np.uint8)
        if len(values) != full + sliding:
            raise RequestError("the reader of files gives as many rows as there are tokens")
        target.restore(list(range(5, 5 + _STATE_ROWS)), KvRows(*(part.reshape(_STATE_ROWS, -1) for part in np.split(values, [full]))))
        target.verify([7])

    return read


def _states(bundle: Bundle) -> Sequence[bytes]:
    with opened_target(bundle, draft=False) as target:
        target.prefill(list(range(5, 5 + _STATE_ROWS)))
        return [b"".join(part.tobytes() for part in target.state())]


READERS = (
    Reader(name="head-file", make=_mapped_head),
    Reader(name="onnx-model", make=_onnx_model, corpus="onnx", memory_factor=PARSED),
    Reader(name="tokenizer-library", make=_tokenizer, corpus="tokenizer", structured=True, memory_factor=PARSED),
    Reader(name="prompt", make=_prompt, needs="gguf", memory_factor=PARSED),
    Reader(name="chat-template", make=_template, guarded=False, memory_factor=PARSED),
    Reader(name="kv-state", make=_kv_state, needs="gguf", seeds=_states, memory_factor=8.0),
)
