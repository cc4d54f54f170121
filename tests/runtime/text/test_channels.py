"""Answers, thoughts and tool calls taken apart: whole, in pieces of any size, up to a stop string, cut off anywhere, and malformed."""

from __future__ import annotations

import json
import random
from typing import Any, ClassVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chat_words import CONTROL, ChatWords
from edge_runtime.errors import RequestError
from edge_runtime.server.json_text import values_of
from edge_runtime.text.channels import MAX_CHANNEL_NAME, ChannelParser, Event, StopStrings, Text, Thought
from edge_runtime.text.tool_calls import (
    MAX_DEPTH,
    QUOTE,
    CallPiece,
    StreamedCall,
    ToolCall,
    begun_arguments,
    cut_tool_call,
    parse_tool_call,
)

WORDS = ChatWords()


def parse(text: str, stop: tuple[str, ...] = (), words: ChatWords = WORDS, *, ended: bool = False, **options: Any) -> list[Event]:
    """All events, neighbours of one kind joined."""
    parser = ChannelParser(words, stop, **options)
    events: list[Event] = []
    for token in words.encode(text, add_bos=False, parse_special=True):
        events += parser.feed(token)
    events += parser.finish(ended=ended)
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
        ("<|tool_call>é", [Text("é")]),
        ("so <|tool_call>I will look<tool_call|>.", [Text("so I will look.")]),
        ("<|tool_call>call: I do not know<turn|>", [Text("call: I do not know")]),
        ("<|tool_call>call:f{a:1,b:<turn|>", [Text("call:f{a:1,b:")]),
        ('<|tool_call>call:f{a:<|"|>x<channel|>y', [Text('call:f{a:<|"|>xy')]),
        ("<|channel>thought\na<|tool_call>b<|channel>thought\nc", [Thought("a"), Text("b"), Thought("c")]),
        ("<|channel><|channel>thought\nhm<channel|>so<channel|>", [Thought("hm"), Text("so")]),
        ("<|turn>model\n<|channel>thought\nhm<channel|>so", [Thought("hm"), Text("so")]),
        ("a<|turn>modes", [Text("amodes")]),
        ("a<|turn>mod<|turn>model\nb", [Text("ab")]),
        ("<|tool_call>call:f{}", [ToolCall(name="f", arguments={}, raw="call:f{}")]),
        ("<|tool_call>call:f{}<turn|>", [ToolCall(name="f", arguments={}, raw="call:f{}")]),
        ("<|tool_call>call:f{}<|tool_call>x", [ToolCall(name="f", arguments={}, raw="call:f{}"), Text("x")]),
        ("<|tool_call>call:f{a:<mask>1}", [ToolCall(name="f", arguments={"a": 1}, raw="call:f{a:1}")]),
    ],
)
def test_answers_and_thoughts(text, events):
    assert parse(text) == events


def test_pieces_come_as_soon_as_they_are_certain():
    parser = ChannelParser(WORDS)
    ids = WORDS.encode("<|channel>thought\na<channel|>b", add_bos=False, parse_special=True)
    assert [parser.feed(i) for i in ids][-3:] == [[Thought("a")], [], [Text("b")]]


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
        ("call:f(a:1,b=Q2Q)", "f", {"a": 1, "b": "2"}),
        ("call:f()", "f", {}),
        (":f{a:[1,],}", "f", {"a": [1]}),
        ("call:f{a:True,b:[False,None]}", "f", {"a": True, "b": [False, None]}),
        ("call:f{a:[1}]}", "f", None),
        ("call:f{a:1,,b:2}", "f", None),
    ],
)
def test_calls_are_read_where_they_can_be(raw, name, arguments):
    raw = raw.replace("Q", QUOTE)
    assert parse_tool_call(raw) == ToolCall(name=name, arguments=arguments, raw=raw)


# As models wrote them, with Q for the mark.
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("pattern:abcQ", {"pattern": "abc"}),
        ("where:Q*.pyQ,pattern:abcQ", {"where": "*.py", "pattern": "abc"}),
        ("pattern:'abcQ", {"pattern": "abc"}),
        ('pattern:"abcQ', {"pattern": "abc"}),
        ("query:Paris, FranceQ,limit:5", {"query": "Paris, France", "limit": 5}),
        ("city:Bern,days:3,note:sunny, they sayQ", {"city": "Bern", "days": 3, "note": "sunny, they say"}),
        ("zip:90210Q", {"zip": "90210"}),
        ("a:[1,xQ,QyQ,true],b:{c:false},d:zQ", {"a": [1, "x", "y", True], "b": {"c": False}, "d": "z"}),
        ("refs:['a','it\\'s'],names:{'k':\"v\"}", {"refs": ["a", "it's"], "names": {"k": "v"}}),
        ("say:'a \"b\"\\n'", {"say": 'a "b"\n'}),
        ("code:Qsql(QQQ SELECT 1 QQQ).df()Q,refs:[QdfQ]", {"code": 'sql(""" SELECT 1 """).df()', "refs": ["df"]}),
        ("a:QQ,b:Q,Q,c:Qx:Q", {"a": "", "b": ",", "c": "x:"}),
        ("a:Qa'bQ,b:'tis fine", {"a": "a'b", "b": "'tis fine"}),
        ("old:Qcode with }],path:Qfile.txtQ", None),
        ("a:Qx,b:QyQ", None),
        ("a:xQyQ", None),
        ("aQ:1", None),
        ("a:QxQ QyQ", {"a": 'x" "y'}),
    ],
)
def test_no_argument_holds_a_mark(written, arguments):
    assert parse_tool_call(f"call:f{{{written}}}".replace("Q", QUOTE)).arguments == arguments


@given(st.text(st.sampled_from("aQ'\"\\,:{}[] 1=<|")))
def test_no_mark_gets_into_an_argument(written):
    for call in (parse_tool_call(f"call:f{{{written}}}".replace("Q", QUOTE)), cut_tool_call(f"call:f{{{written}".replace("Q", QUOTE))):
        arguments = call.arguments or begun_arguments(call.partial or "")
        assert QUOTE not in str(list(values_of([arguments])))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"text": "Par', {"text": "Par"}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": 1, "b": ', {"a": 1}),
        ('{"a": [1, {"b": tr', {"a": [1, {}]}),
        ('{"a": "x\\u00', {"a": "x"}),
        ('{"a": "x\\ud83d\\ude0', {"a": "x"}),
        ('{"a": "x\\', {"a": "x"}),
        ('{"a": 1}}', {"a": 1}),
        ('{"a": 1, oops]', {"a": 1}),
        *((text, {}) for text in ("", "null", "[]", "[1", '"x"', "12", "what?", "{", "}", "{]")),
    ],
)
def test_what_the_beginning_of_arguments_says(text, arguments):
    assert begun_arguments(text) == arguments


@given(st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5)), st.data())
def test_any_beginning_of_arguments_is_taken(arguments, data):
    text = json.dumps(arguments, ensure_ascii=data.draw(st.booleans()))
    cut = begun_arguments(text[: data.draw(st.integers(0, len(text)))])
    assert {name: cut[name] for name in list(cut)[:-1]}.items() <= arguments.items()
    assert list(cut) == list(arguments)[: len(cut)]


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
def test_long_nonsense_is_read(raw):
    """Where reading took time as the square of the length, this would not end."""
    assert parse_tool_call(raw).arguments is None


def test_a_call_without_end_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr("edge_runtime.text.channels.MAX_CALL_CHARACTERS", 10)
    assert parse("<|tool_call>" + "x" * 15) == [Text("x" * 15)]


def test_stop_strings_end_answers_and_not_thoughts():
    assert parse("<|channel>thought\nSTOP<channel|>abSTOPcd", stop=("STOP",)) == [Thought("STOP"), Text("ab")]
    assert parse("abST", stop=("STOP",)) == [Text("abST")]


def test_a_vocabulary_without_channels_has_answers_only():
    assert parse("<|channel>thought\n", words=ChatWords(["<bos>"])) == [Text("<|channel>thought\n")]


MARKS = {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|turn>", "<turn|>", "<eos>"}
PARTS = st.lists(st.sampled_from([*CONTROL, *("<|channel>", "<|tool_call>", QUOTE) * 4, "thought\n", "call:f{", "a:", "}", "a", "é"]))


def kept_of(parts: list[str]) -> str:
    """What an answer says, in order: all but control tokens, and but for the first line of a channel that is its name."""
    text, name = "", None
    for part in [*parts, "<eos>"]:
        if part in MARKS:
            text += "" if name is None or "thought".startswith(name.strip()) else name
            name = "" if part == "<|channel>" else None
        elif part not in CONTROL or part == QUOTE:
            line, newline, rest = ("" if name is None else name + part).partition("\n")
            text += part if name is None else "" if not newline else rest if line.strip() == "thought" else line + newline + rest
            name = line if name is not None and not newline else None
    return text


def said(events: list[Event]) -> str:
    return "".join(e.raw if isinstance(e, ToolCall) else e.text for e in events)


@example(["<|channel>", "é", "thought\n"], False)
@example(["<|tool_call>", "é"], False)
@example(["<|tool_call>", "call:f{", QUOTE, "é", "<|channel>", "é"], True)
@given(PARTS, st.booleans())
def test_any_sequence_is_taken_and_keeps_its_text(parts, ended):
    events = parse("".join(parts), ended=ended)
    assert said(events) == kept_of(parts)
    assert not any(QUOTE in str(list(values_of([e.arguments]))) for e in events if isinstance(e, ToolCall))


@example(["<|channel>"], ["thought\n", "é"])
@given(PARTS, PARTS)
def test_an_answer_goes_on_where_its_prompt_ended(prompt, answer):
    """What the prompt opened is as if the answer had opened it."""
    whole = ["<|turn>", *prompt]
    opened = whole[max(i for i, part in enumerate(whole) if part in MARKS) :]
    ids = WORDS.encode("".join(whole), add_bos=False, parse_special=True)
    events = parse("".join(answer), prompt=ids)
    line = "".join(part for part in opened[1:] if part not in CONTROL or part == QUOTE)
    if opened[0] == "<|channel>" and ("\n" in line or len(line) > MAX_CHANNEL_NAME):
        assert kept_of(opened) + said(events) == kept_of([*opened, *answer])
    elif opened[0] in ("<|channel>", "<|tool_call>"):  # which is not over
        assert said(events) == kept_of([*opened, *answer])
    else:
        assert said(events) == kept_of(answer)


@pytest.mark.parametrize(
    ("prompt", "answer", "events"),
    [
        ("<|turn>model\n<|channel>thought\n", "hm<channel|>so", [Thought("hm"), Text("so")]),
        ("<|channel>", "thought\nhm<channel|>so", [Thought("hm"), Text("so")]),
        ("<|channel>thought\nhm", "m", [Thought("m")]),
        ("<|channel>thought\n", "<|channel>thought\nhm<channel|>so", [Thought("hm"), Text("so")]),
        ("<|channel>thought\n", "hm<|tool_call>call:f{}", [Thought("hm"), ToolCall(name="f", arguments={}, raw="call:f{}")]),
        ("<|channel>thought\n<channel|>", "so", [Text("so")]),
        ("<|channel>thought\na<turn|>\n<|turn>model\nEND", "so", [Text("so")]),
        ("<|tool_call>call:f", "{}", [ToolCall(name="f", arguments={}, raw="call:f{}")]),
        ("no marks", "so", [Text("so")]),
    ],
)
def test_a_prompt_may_open_a_channel_or_a_call(prompt, answer, events):
    assert parse(answer, ("END",), prompt=WORDS.encode(prompt, parse_special=True)) == events


def test_calls_are_text_where_none_are_wanted():
    assert parse("so <|tool_call>call:f{a:1}<tool_call|>!", calls=False) == [Text("so call:f{a:1}!")]


def test_what_is_no_call_ends_at_stop_strings():
    assert parse("a<|tool_call>bSTOPc<tool_call|>d", stop=("STOP",)) == [Text("ab")]
    assert parse("a<|tool_call>bST<channel|>OP", stop=("STOP",)) == [Text("abSTOP")]


def test_a_call_that_was_cut_off_has_the_beginning_of_its_arguments():
    words = 'call:get.time|{|city:|Q|Tokyo "x"|Q|,days|:|3|,|deep:{a:[1,true,|Q|b|Q|]|}}'
    tokens = [word.replace("Q", QUOTE) for word in words.split("|")]
    whole = json.dumps({"city": 'Tokyo "x"', "days": 3, "deep": {"a": [1, True, "b"]}}, separators=(",", ":"))
    for count in range(1, len(tokens)):
        call = cut_tool_call("".join(tokens[:count]))
        assert call.arguments is None
        if count > 1:
            assert (call.name, whole.startswith(call.partial)) == ("get.time", True), call.partial
    assert cut_tool_call("".join(tokens[:5])).partial == '{"city":"Tokyo \\"x\\"'
    assert cut_tool_call("".join(tokens)).arguments_json == json.dumps(json.loads(whole))
    assert parse("so <|tool_call>call:ge") == [Text("so call:ge")]
    assert parse("<|tool_call>call:f{a:1")[0].partial == '{"a":'
    assert [cut_tool_call(f"call:f{{a:{text}").partial for text in ("x{b", '<|"|>x<|"|>:', "[x{")] == [None] * 3
    assert parse("<|tool_call>call:f{a:x{b") == [Text("call:f{a:x{b")]


class Pieces:
    """A vocabulary whose tokens are pieces of a text's bytes."""

    control_tokens: ClassVar[dict[str, int]] = {}

    def __init__(self, data: bytes, size: int) -> None:
        self.pieces = [data[i : i + size] for i in range(0, len(data), size)]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return self.pieces[token]


def spelt(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def test_half_a_character_waits_and_an_unfinished_one_is_marked():
    parser = ChannelParser(Pieces("caf\xe9\u4e16".encode()[:-1], 4), channels=False)
    assert [spelt(parser.feed(token)) for token in (0, 1)] == ["caf", "\xe9"]
    assert spelt(parser.finish()) == "\ufffd"


def cut(text: str, stops: list[str]) -> str:
    """The definition: character by character, until a stop string is complete; then without the longest that is."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))]
    return text


letters = st.text("abc", max_size=40)


@given(letters, st.lists(st.text("abc", min_size=1, max_size=5), max_size=3), st.data())
@settings(max_examples=400, deadline=None)
def test_any_split_cuts_where_the_whole_text_is_cut(text, stops, data):
    stream, out, expected = StopStrings(stops), "", cut(text, stops)
    rest = text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        out += stream.feed(rest[:size])
        rest = rest[size:]
        assert expected.startswith(out), "a part of a stop string leaked, or text after it"
    assert out + stream.finish() == expected
    assert (stream.stopped_by is not None) == (expected != text)


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=3), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_bytes_of_any_text_are_cut_alike(text, stops, size):
    data = text.encode("utf-8", "surrogatepass")
    vocabulary = Pieces(data, size)
    parser = ChannelParser(vocabulary, stops, channels=False)
    texts = [spelt(parser.feed(token)) for token in range(len(vocabulary.pieces))]
    assert "".join(texts) + spelt(parser.finish()) == cut(data.decode("utf-8", "replace"), stops)


def test_only_what_may_begin_a_stop_string_is_held_back():
    stream = StopStrings(["</end>"])
    assert stream.feed("x < y </e") == "x < y "
    assert stream.feed("m>") == "</em>"
    assert stream.feed("z</end>more") == "z"
    assert stream.stopped_by == "</end>"
    assert stream.feed("more") == stream.finish() == ""


@pytest.mark.parametrize(("stops", "words"), [([""], "0 characters"), (["x" * 1001], "1001 characters"), ("END", "the string 'END'")])
def test_stop_strings_that_make_no_sense_are_refused(stops, words):
    with pytest.raises(RequestError, match=words):
        StopStrings(stops)


# What the notation is made of, and what models write instead of it.
NOTATION = [*"{}[],:=()'\" \n\\\ufdd0é", QUOTE, "a", "b c", "12", "true", "null", "<|", "|>"]
WRITTEN = [*NOTATION, "\ufdd0", "(", ")", "x:", f"y:{QUOTE}", f"{QUOTE},", f"z:{QUOTE}text{QUOTE}"]


def streamed(raw: str, *places: int, cut: bool = False) -> tuple[list[CallPiece], ToolCall]:
    """The pieces of a call whose text is split at these places, and the call that follows them."""
    call, pieces = StreamedCall(), []
    for first, end in zip([0, *places], [*places, len(raw)], strict=True):
        pieces += call.feed(raw[first:end])
    return pieces, call.ended((cut_tool_call if cut else parse_tool_call)(raw))


def test_the_name_comes_first_and_a_string_while_it_is_written() -> None:
    raw = f'call:write{{path:{QUOTE}a.py{QUOTE},text:{QUOTE}say "hi"\n{QUOTE}}}'
    pieces, call = streamed(raw, *range(1, len(raw)))
    assert [piece.name for piece in pieces] == ["write", *[None] * (len(pieces) - 1)]
    assert pieces[0].arguments == "{"
    assert len(pieces) > len("a.py" + 'say "hi"')
    assert call.unsent == "}"
    assert json.loads("".join(piece.arguments for piece in pieces) + call.unsent) == {"path": "a.py", "text": 'say "hi"\n'}


@pytest.mark.parametrize(
    ("raw", "sent"),
    [
        ("call: I do not know", None),
        ("call:f(a:1)", None),
        (f"call:f{{a:1,b=2,c:{QUOTE}x{QUOTE}}}", '{"a":1'),
        ('call:f{a:"x"}', '{"a":'),
        (f"call:f{{a:echo b, c{QUOTE}}}", '{"a":'),
        (f"call:f{{a:[1,2,],b:{{}},c:{QUOTE}x{QUOTE} {QUOTE}y{QUOTE}}}", '{"a":[1,2],"b":{},"c":"x\\" \\"y"'),
        ("call:f{" + "a:{" * (MAX_DEPTH + 2) + "}" * (MAX_DEPTH + 3), '{"a":' * (MAX_DEPTH + 1)),
        ("call:f{a:" + "7" * 2000 + "}", '{"a":'),
    ],
)
def test_nothing_is_sent_that_may_turn_out_otherwise(raw: str, sent: str | None) -> None:
    pieces, call = streamed(raw, *range(1, len(raw)))
    assert ("".join(piece.arguments for piece in pieces) if pieces else None) == sent
    if call.arguments is not None and pieces:
        assert json.loads((sent or "") + (call.unsent or "")) == call.arguments


def test_a_call_that_is_none_after_all_stays_none() -> None:
    pieces, call = streamed("call:f{a:1}}")
    assert (pieces, call.arguments_json) == ([CallPiece("f", '{"a":1')], None)


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.sampled_from(WRITTEN), max_size=16), st.randoms(use_true_random=False), st.booleans())
def test_pieces_and_rest_are_the_whole(parts: list[str], chance: random.Random, cut: bool) -> None:
    raw = "call:f{" + "".join(parts) + chance.choice(["", "}"])
    pieces, call = streamed(raw, *sorted(chance.randrange(len(raw) + 1) for _ in range(8)), cut=cut)
    whole = (cut_tool_call if cut else parse_tool_call)(raw)
    assert (call.name, call.arguments, call.partial) == (whole.name, whole.arguments, whole.partial)
    if call.unsent is not None:
        written = "".join(piece.arguments for piece in pieces) + call.unsent
        assert written == call.partial if call.arguments is None else json.loads(written) == call.arguments
