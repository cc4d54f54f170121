"""Answers, thoughts and tool calls taken apart: whole, cut off anywhere, and malformed."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chat_words import CONTROL, ChatWords
from edge_runtime.text.channels import ChannelParser, Event, Text, Thought
from edge_runtime.text.tool_calls import QUOTE, ToolCall, cut_tool_call, parse_tool_call

WORDS = ChatWords()


def parse(text: str, stop: tuple[str, ...] = (), words: ChatWords = WORDS) -> list[Event]:
    """All events, neighbours of one kind joined."""
    parser = ChannelParser(words, stop)
    events: list[Event] = []
    for token in words.encode(text, add_bos=False, parse_special=True):
        events += parser.feed(token)
    events += parser.finish()
    joined: list[Event] = []
    for event in events:
        if joined and type(event) is type(joined[-1]) and not isinstance(event, ToolCall):
            joined[-1] = type(event)(joined[-1].text + event.text)
        else:
            joined.append(event)
    return joined


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("plain é 🎉<turn|>", [Text("plain é 🎉")]),
        ("<|channel>thought\nhm\n<channel|>so<turn|>", [Thought("hm\n"), Text("so")]),
        ("<|channel>thought\n<channel|>so", [Text("so")]),
        ("<|channel>thought\na<channel|>b<|channel>thought\nc<channel|>d", [Thought("a"), Text("b"), Thought("c"), Text("d")]),
        ("<|channel>thought\ncut of", [Thought("cut of")]),
        ("<|channel>thou", []),
        ("<|channel>", []),
        ("<|channel>no newline<channel|>so", [Thought("no newline"), Text("so")]),
        ("<|channel>" + "x" * 50, [Thought("x" * 50)]),
        ("a<channel|>b", [Text("ab")]),
        ("a<|tool_response>", [Text("a")]),
        ('a<|"|>b', [Text('a<|"|>b')]),
    ],
)
def test_answers_and_thoughts(text, events):
    assert parse(text) == events


def test_pieces_come_as_soon_as_they_are_certain():
    parser = ChannelParser(WORDS)
    ids = WORDS.encode("<|channel>thought\na<channel|>b", add_bos=False, parse_special=True)
    assert [parser.feed(i) for i in ids][-3:] == [[Thought("a")], [], [Text("b")]]


def test_a_call_after_thoughts_that_were_not_closed():
    raw = 'call:f{a:1,b:<|"|>x{,}"<|"|>,c:[1,<|"|>y<|"|>,{d:true}],e:null,f:-1.5e3}'
    arguments = {"a": 1, "b": 'x{,}"', "c": [1, "y", {"d": True}], "e": None, "f": -1500.0}
    assert parse(f"<|channel>thought\nx<|tool_call>{raw}<tool_call|><|tool_response>") == [
        Thought("x"),
        ToolCall(name="f", arguments=arguments, raw=raw),
    ]


@pytest.mark.parametrize(
    ("raw", "name", "arguments"),
    [
        ("call:f{}", "f", {}),
        (" call : get.time { zone : UTC , n : 3 } ", "get.time", {"zone": "UTC", "n": 3}),
        ('call:f{"a": "b\\n\\u00e9", "c": [], "d": {}}', "f", {"a": "b\né", "c": [], "d": {}}),
        ('call:f{<|"|>odd key:<|"|>:1}', "f", {"odd key:": 1}),
        ("call:f{two words:and more}", "f", {"two words": "and more"}),
        ("call:f", "f", None),
        ("call:f{a:", "f", None),
        ("call:f{a:1", "f", None),
        ("call:f{a:1}}", "f", None),
        ("call:f{a:1} and more", "f", None),
        ('call:f{a:<|"|>open}', "f", None),
        ('call:f{a:"bad \\x"}', "f", None),
        ("call:f{:1}", "f", None),
        ("call:f{a b}", "f", None),
        ("call:f{a:[}", "f", None),
        ("call:f" + "{a:" * 1000, "f", None),
        ("f{a:1}", None, None),
        ("", None, None),
        ("call:f{a:NaN,b:[-Infinity,1e999]}", "f", {"a": "NaN", "b": ["-Infinity", "1e999"]}),
        ('call:f{"\\ud800":"\\ud83d\\ude00\\udc00"}', "f", {"\ufffd": "\U0001f600\ufffd"}),
    ],
)
def test_calls_are_read_where_they_can_be(raw, name, arguments):
    assert parse_tool_call(raw) == ToolCall(name=name, arguments=arguments, raw=raw)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_characters="<")),
        lambda inner: st.lists(inner) | st.dictionaries(st.from_regex("[a-z_]+", fullmatch=True), inner),
        max_leaves=8,
    )
)
def test_what_the_notation_writes_is_read_back(value):
    def write(value) -> str:
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        if isinstance(value, dict):
            return "{" + ",".join(f"{k}:{write(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(write, value)) + "]"
        return (
            {True: "true", False: "false", None: "null"}.get(value, str(value))
            if not isinstance(value, int) or isinstance(value, bool)
            else str(value)
        )

    assert parse_tool_call(f"call:f{{v:{write(value)}}}").arguments == {"v": value}


@pytest.mark.parametrize(
    "raw",
    [
        "call:f{" + "a " * 500_000,
        "call:f{a" + " " * 1_000_000 + "{}",
        "call:f{" + "a:1," * 250_000 + "b}",
        "call:f{a:[" + "x," * 250_000 + QUOTE + "y]}",
        "call:f{a:[" + "'x," * 250_000 + QUOTE,
        "call:f{a:[" + "x," * 250_000 + "k:z" + QUOTE,
        "call:f{a:" + f"{QUOTE},{QUOTE}x" * 100_000,
        "call:f{a:" + f"{QUOTE}   " * 200_000,
        "call:f{a:" + "'b\\" * 200_000,
        "call:" + " " * 1_000_000,
        "call:f{a:" + '"\\' * 500_000,
    ],
)
def test_long_nonsense_is_read_quickly(raw):
    begin = time.process_time()
    assert parse_tool_call(raw).arguments is None
    assert time.process_time() - begin < 5


def test_a_call_without_end_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr("edge_runtime.text.channels.MAX_CALL_CHARACTERS", 10)
    assert parse("<|tool_call>" + "x" * 15) == [Text("x" * 15)]


def test_stop_strings_end_answers_and_not_thoughts():
    assert parse("<|channel>thought\nSTOP<channel|>abSTOPcd", stop=("STOP",)) == [Thought("STOP"), Text("ab")]
    assert parse("abST", stop=("STOP",)) == [Text("abST")]


def test_a_vocabulary_without_channels_has_answers_only():
    assert parse("<|channel>thought\n", words=ChatWords(["<bos>"])) == [Text("<|channel>thought\n")]


@example(["<|channel>", "é", "thought\n"])
@given(st.lists(st.sampled_from([*CONTROL, "thought\n", "call:f{", "}", "a", "é"])))
def test_any_sequence_is_taken_and_keeps_its_text(parts):
    kept = "".join(e.raw if isinstance(e, ToolCall) else e.text for e in parse("".join(parts)))
    assert kept.count("é") == parts.count("é")


def test_a_call_that_was_cut_off_has_the_beginning_of_its_arguments():
    tokens = [
        "call:get.time",
        "{",
        "city:",
        QUOTE,
        'Tokyo "x"',
        QUOTE,
        ",days",
        ":",
        "3",
        ",",
        "deep:{a:[1,true,",
        QUOTE,
        "b",
        QUOTE,
        "]",
        "}}",
    ]
    whole = json.dumps({"city": 'Tokyo "x"', "days": 3, "deep": {"a": [1, True, "b"]}}, separators=(",", ":"))
    for count in range(1, len(tokens)):
        call = cut_tool_call("".join(tokens[:count]))
        assert call.arguments is None
        if count > 1:
            assert (call.name, whole.startswith(call.partial)) == ("get.time", True), call.partial
    assert cut_tool_call("".join(tokens[:5])).partial == '{"city":"Tokyo \\"x\\"'
    assert cut_tool_call("".join(tokens)).arguments_json == json.dumps(json.loads(whole))
    assert parse("so <|tool_call>call:ge") == [Text("so "), ToolCall(name=None, arguments=None, raw="")]
    assert parse("<|tool_call>call:f{a:1")[0].partial == '{"a":'
    assert [cut_tool_call(f"call:f{{a:{text}").partial for text in ("x{b", '<|"|>x<|"|>:', "[x{")] == ['{"a":"x"', '{"a":"x"', '{"a":["x"']
