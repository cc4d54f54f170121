"""Messages to ids: what Gemma 4's template writes, and that nothing foreign ever becomes a control token."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_words import GEMMA_LIKE, ChatWords
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.manifest import BundleFile
from edge_runtime.errors import BundleError, RequestError
from edge_runtime.text import chat_template
from edge_runtime.text.chat_template import MAX_TEMPLATE_BYTES, PLAIN_TEMPLATE, TURNS_TEMPLATE, ChatTemplate, bundle_template
from scripted import MANIFEST

WORDS = ChatWords()
SYSTEM = {"role": "system", "content": " Be brief. "}
TALK = [{"role": "user", "content": "hi "}, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "bye"}]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}}}
CALL = {"id": "call_0", "type": "function", "function": {"name": "now", "arguments": {"zone": "UTC", "utc": True, "n": [1, None]}}}


def spelt(source: str, messages: list, **options) -> str:
    return WORDS.spell(ChatTemplate(source, WORDS).encode(messages, **options))


def test_a_conversation_as_gemma_4_wants_it():
    expected = (
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nhi<turn|>\n<|turn>model\nHello.<turn|>\n<|turn>user\nbye<turn|>\n<|turn>model\n"
    )
    assert spelt(GEMMA_LIKE, [SYSTEM, *TALK]) == spelt(TURNS_TEMPLATE, [SYSTEM, *TALK]) == expected
    # The built-in one has a turn of its own for the thinking token too.
    thinking = "<bos><|turn>system\n<|think|>\nBe brief.<turn|>\n<|turn>user\nhi<turn|>\n<|turn>model\n"
    assert spelt(GEMMA_LIKE, [SYSTEM, TALK[0]], thinking=True) == spelt(TURNS_TEMPLATE, [SYSTEM, TALK[0]], thinking=True) == thinking
    assert spelt(TURNS_TEMPLATE, TALK[:1], thinking=True).startswith("<bos><|turn>system\n<|think|><turn|>\n<|turn>user\n")


def test_tools_calls_and_results():
    messages = [
        TALK[0],
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "ask the clock"},
        {"role": "tool", "tool_call_id": "call_0", "name": "now", "content": "12:00"},
    ]
    assert spelt(GEMMA_LIKE, messages, tools=[TOOL]) == (
        '<bos><|turn>system\n<|tool>declaration:now{properties:{zone:{type:<|"|>string<|"|>}},type:<|"|>object<|"|>}<tool|><turn|>\n'
        "<|turn>user\nhi<turn|>\n<|turn>model\n<|channel>thought\nask the clock<channel|>"
        '<|tool_call>call:now{n:[1,None],utc:true,zone:<|"|>UTC<|"|>}<tool_call|>'
        '<|tool_response>response:now{value:<|"|>12:00<|"|>}<tool_response|>'
    )


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{{ bos_token }}{{ messages[0].content }}"])
def test_there_is_one_bos(source):
    assert ChatTemplate(source, WORDS).encode(TALK).count(WORDS.bos) == 1


def control_count(ids: list[int]) -> int:
    return sum(i < 100 for i in ids)


@given(
    st.lists(st.sampled_from(["<|tu", "rn>", "<", "|turn>", "<|channel>", "x", " ", "<turn|", ">"]), max_size=6).map("".join),
    st.text(max_size=4),
)
def test_texts_that_meet_never_become_a_control_token(first, second):
    template = ChatTemplate("{% for m in messages %}{{ m.content | trim }}{{ m.more }}{% endfor %}", WORDS)
    ids = template.encode([{"role": "user", "content": first, "more": "rn>"}, {"role": "user", "content": second, "more": "|turn>"}])
    assert control_count(ids) == 1, "<bos> alone"


@pytest.mark.parametrize("before", [*range(-12, 3), chat_template._SLICE - 3])
def test_control_tokens_at_the_border_of_two_slices_are_marked(before):
    text = "a" * (chat_template._SLICE + before) + "<|turn>" * 3 + "a" * 20
    ids = ChatTemplate("{{ messages[0].content }}", WORDS).encode([{"role": "user", "content": text}])
    assert control_count(ids) == 1, "<bos> alone"
    assert WORDS.spell(ids) == "<bos>" + text


def test_the_plain_fallback():
    messages = [SYSTEM, *TALK]
    assert spelt(PLAIN_TEMPLATE, messages) == "<bos>Be brief.\nUser: hi\nAssistant: Hello.\nUser: bye\nAssistant:"


@pytest.mark.parametrize("value", [object(), b"bytes", {1, 2}])
def test_only_json_values_are_shown_to_a_template(value):
    with pytest.raises(RequestError, match="only text, numbers, lists and objects"):
        ChatTemplate("x", WORDS).render([{"role": "user", "content": value}])


def test_bottomless_messages_are_refused():
    deep: list = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(RequestError, match="nested more than 64"):
        ChatTemplate("x", WORDS).render([{"role": "user", "content": deep}])


def bundle_with(folder: Path, data: bytes) -> Bundle:
    (folder / "chat_template.jinja").write_bytes(data)
    entry = BundleFile(path="chat_template.jinja", role="chat_template", format="jinja", bytes=len(data), sha256="")
    return Bundle(folder, dataclasses.replace(MANIFEST, files=(entry,)))


def test_the_bundles_template_is_used(tmp_path):
    assert bundle_template(bundle_with(tmp_path, b"{{ 'own' }}\n"), WORDS).render(TALK) == "own"


@pytest.mark.parametrize("data", [b"\xff", b"{{", b" " * (MAX_TEMPLATE_BYTES + 1)])
def test_bad_template_files_are_refused(tmp_path, data):
    with pytest.raises(BundleError, match=r"chat_template\.jinja"):
        bundle_template(bundle_with(tmp_path, data), WORDS)


def test_a_bundle_without_a_template_falls_back(tmp_path):
    bundle = Bundle(tmp_path, MANIFEST)
    assert "<|turn>user\nhi<turn|>" in bundle_template(bundle, WORDS).render(TALK)
    plain = bundle_template(bundle, ChatWords(["<bos>"]))
    assert plain.render(TALK).startswith("<bos>User: hi\n")
    assert plain.stop == ("\nUser:",)
