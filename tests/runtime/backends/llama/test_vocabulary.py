from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_runtime.backends.llama.context import LlamaOptions
from edge_runtime.backends.llama.target import LlamaTarget, LlamaVocabulary
from edge_runtime.errors import RequestError
from edge_runtime.text.chat_template import ChatTemplate

TEXTS = [
    "",
    "hello world",
    "  two  spaces ",
    "def f(x):\n    return x\n\n\n",
    "tabs\t\tand\r\nreturns\r\r\r",
    "é ü 漢字 🎉",
    "\x00nul\x00 and \x7f\x01",
    "\u2028 \u0085 \xa0",
    "\ufeffmark",
    " \n\n\n ",
    "<|turn>user\nhi<turn|>\n<bos>",
    "a" * 20000,
    "\n" * 20000,
]


@pytest.fixture(scope="module")
def vocabulary(reference_pair: Any) -> Iterator[LlamaVocabulary]:
    with LlamaTarget(reference_pair.target, LlamaOptions(context=64, threads=1, batch=32, draft=False)) as target:
        yield target.vocabulary


@pytest.fixture(scope="module")
def reference(reference_pair: Any) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer.from_file(str(reference_pair.target_checkpoint / "tokenizer.json"))


def decoded(vocabulary: LlamaVocabulary, tokens: list[int]) -> str:
    return b"".join(vocabulary.piece(token, special=True) for token in tokens).decode()


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:12]))
def test_ids_equal_the_reference_tokenizer(vocabulary: LlamaVocabulary, reference: Any, text: str) -> None:
    tokens = vocabulary.encode(text, add_bos=False, parse_special=True)
    assert tokens == reference.encode(text, add_special_tokens=False).ids
    assert decoded(vocabulary, tokens) == text


@pytest.mark.parametrize("around", ["{}", "a{}b", " {} "])
def test_runs_of_newlines(vocabulary: LlamaVocabulary, reference: Any, around: str) -> None:
    for count in (*range(1, 36), 63, 64, 65, 257):
        text = around.format("\n" * count)
        tokens = vocabulary.encode(text, add_bos=False)
        assert decoded(vocabulary, tokens) == text
        # llama.cpp takes a run that is a token of its own as that token, whatever the merges say (src/llama-vocab.cpp, gemma4).
        whole = reference.token_to_id("\n" * count)
        assert tokens == reference.encode(text, add_special_tokens=False).ids or (whole is not None and whole in tokens), count


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=(), exclude_characters="▁"), max_size=80))
def test_any_string_is_encoded_without_loss(vocabulary: LlamaVocabulary, text: str) -> None:
    well_formed = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert decoded(vocabulary, vocabulary.encode(text, add_bos=False)) == well_formed


def test_surrogates(vocabulary: LlamaVocabulary) -> None:
    assert vocabulary.encode("\ud83d\ude00") == vocabulary.encode("\U0001f600")
    assert vocabulary.encode("a\ud83d") == vocabulary.encode("a\ufffd")


def test_control_tokens_are_text_unless_asked_for(vocabulary: LlamaVocabulary) -> None:
    turn = vocabulary.encode("<|turn>", add_bos=False, parse_special=True)
    assert len(turn) == 1
    assert turn[0] not in vocabulary.encode("<|turn>", add_bos=False)
    assert vocabulary.piece(turn[0]) == b""
    assert vocabulary.piece(turn[0], special=True) == b"<|turn>"


def test_bos_comes_once_and_first(vocabulary: LlamaVocabulary) -> None:
    assert vocabulary.encode("hi") == [vocabulary.bos, *vocabulary.encode("hi", add_bos=False)]
    assert vocabulary.encode("") == [vocabulary.bos]


def test_ends_of_generation(vocabulary: LlamaVocabulary) -> None:
    (end_of_turn,) = vocabulary.encode("<turn|>", add_bos=False, parse_special=True)
    assert {vocabulary.eos, end_of_turn} <= vocabulary.eog_tokens
    assert vocabulary.bos not in vocabulary.eog_tokens


@pytest.mark.parametrize("token", [-1, 1 << 20])
def test_unknown_ids_are_refused(vocabulary: LlamaVocabulary, token: int) -> None:
    with pytest.raises(RequestError, match=f"token id {token} is not in the vocabulary of {vocabulary.size} tokens"):
        vocabulary.piece(token)


def test_control_tokens_are_all_that_a_conversation_is_made_of(vocabulary: LlamaVocabulary) -> None:
    control = vocabulary.control_tokens
    assert {"<bos>", "<eos>", "<|turn>", "<turn|>", "<|think|>", "<|channel>", "<tool_call|>", '<|"|>'} <= set(control)
    assert all(vocabulary.encode(text, add_bos=False, parse_special=True) == [token] for text, token in control.items())
    assert len(control) < 30, "no run of newlines and no byte is among them"


def test_the_shipped_template_keeps_users_from_forging_turns(vocabulary: LlamaVocabulary, reference_pair: Any) -> None:
    template = ChatTemplate((reference_pair.target_checkpoint / "chat_template.jinja").read_text(), vocabulary)
    foreign = " ".join(vocabulary.control_tokens)
    ids = template.encode([{"role": "user", "content": foreign}])
    assert decoded(vocabulary, ids) == f"<bos><|turn>user\n{foreign}<turn|>\n<|turn>model\n"
    assert [i for i in ids if i in vocabulary.control_tokens.values()] == [
        vocabulary.control_tokens[text] for text in ("<bos>", "<|turn>", "<turn|>", "<|turn>")
    ]
