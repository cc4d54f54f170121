"""The tokenizer of the ONNX path gives what llama.cpp's gives for the same checkpoint."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

from edge_runtime.backends.llama.target import LlamaVocabulary
from edge_runtime.backends.onnx.target import TokenizerVocabulary
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.errors import BundleError, RequestError
from edge_runtime.session.open import open_session
from edge_runtime.text.chat_template import bundle_template

Both = tuple[TokenizerVocabulary, LlamaVocabulary]


@pytest.fixture(scope="module")
def both(onnx_pair: Callable[[str], Path], exported_pair: Path, probe_memory: None) -> Iterator[Both]:
    bundle = open_bundle(onnx_pair("f32"))
    assert bundle.manifest.onnx is not None
    own = TokenizerVocabulary(bundle.path("tokenizer"), bundle.manifest.onnx, bundle.manifest.architecture.vocab_size)
    with open_session(exported_pair, threads=1, drafter="none", backend="llama") as session:
        theirs = session.vocabulary
        assert isinstance(theirs, LlamaVocabulary)
        yield own, theirs


TEXTS = [
    "",
    " ",
    "def f(n):\n\treturn n\n",
    "naïve  café — Straße",
    "日本語 🤖",
    "a\x00b",
    "\ud83e",
    "<bos><|turn>user<turn|>",
    "   \n\n\n  x",
    'a<|channel>b <|"|> c<tool|>',
]


def test_the_same_tokens(both: Both) -> None:
    own, theirs = both
    generator = random.Random(3)
    letters = "abcdef ()[]:\n\t_=+*0123456789äß€日🤖'\"<>|"
    texts = TEXTS + ["".join(generator.choices(letters, k=generator.randrange(1, 60))) for _ in range(200)]
    for text in texts:
        assert own.encode(text) == theirs.encode(text), text
        assert own.encode(text, add_bos=False, parse_special=True) == theirs.encode(text, add_bos=False, parse_special=True), text


def test_the_same_bytes_and_the_same_ends(both: Both) -> None:
    own, theirs = both
    assert own.size == theirs.size
    assert own.bos == theirs.bos
    assert own.eos == theirs.eos
    assert own.eog_tokens == theirs.eog_tokens
    assert dict(own.control_tokens) == dict(theirs.control_tokens)
    for token in range(own.size):
        assert own.piece(token) == theirs.piece(token), token
        assert own.piece(token, special=True) == theirs.piece(token, special=True), token


def test_ids_and_files_that_are_none(both: Both, onnx_pair: Callable[[str], Path], tmp_path: Path) -> None:
    own, _ = both
    for token in (-1, own.size):
        with pytest.raises(RequestError, match="not in the vocabulary"):
            own.piece(token)
    (tmp_path / "tokenizer.json").write_text("{}")
    graphs = open_bundle(onnx_pair("f32")).manifest.onnx
    assert graphs is not None
    with pytest.raises(BundleError, match="is no tokenizer"):
        TokenizerVocabulary(tmp_path / "tokenizer.json", graphs, 10)


def test_a_listed_control_token_that_the_file_does_not_have(onnx_pair: Callable[[str], Path]) -> None:
    """A hostile bundle lists one: a chat would end in a traceback."""
    bundle = open_bundle(onnx_pair("f32"))
    assert bundle.manifest.onnx is not None
    size = bundle.manifest.architecture.vocab_size
    graphs = replace(bundle.manifest.onnx, control_tokens=(*bundle.manifest.onnx.control_tokens, size))
    own = TokenizerVocabulary(bundle.path("tokenizer"), graphs, size + 1)
    assert size not in own.control_tokens.values()
    assert bundle_template(bundle, own).render([{"role": "user", "content": "hi"}])


def test_marks_that_the_file_calls_ordinary_are_kept_out_of_foreign_text_too(onnx_pair: Callable[[str], Path], tmp_path: Path) -> None:
    """The tokenizer finds them in any text, whatever the file calls them."""
    bundle = open_bundle(onnx_pair("f32"))
    assert bundle.manifest.onnx is not None
    file = json.loads(bundle.path("tokenizer").read_text())
    for token in file["added_tokens"]:
        token["special"] = token["special"] and token["content"] != "<|channel>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    own = TokenizerVocabulary(tmp_path / "tokenizer.json", bundle.manifest.onnx, bundle.manifest.architecture.vocab_size)
    assert own.control_tokens["<|channel>"] in own.encode("a<|channel>b")


@pytest.mark.parametrize("long_special", [False, True])
def test_a_short_text_does_not_wait_for_a_long_one(both: Both, monkeypatch: pytest.MonkeyPatch, long_special: bool) -> None:
    own, _ = both
    begun, going, tokenizer = threading.Event(), threading.Event(), own._tokenizer
    turn = own.control_tokens["<|turn>"]

    def encode(text: str, **options: Any) -> Any:
        if len(text) > 1000:
            begun.set()
            going.wait(300)
        return tokenizer.encode(text, **options)

    monkeypatch.setattr(own, "_tokenizer", SimpleNamespace(encode=encode))
    long = threading.Thread(target=lambda: own.encode("a" * 2000, parse_special=long_special))
    long.start()
    assert begun.wait(300), "the long text was not begun"
    assert own.encode("<|turn>b", add_bos=False, parse_special=True)[0] == turn
    assert own.encode("<|turn>b", add_bos=False)[0] != turn
    assert long.is_alive()
    going.set()
    long.join()
