"""A call that comes in pieces is the call that comes whole, however its text is split."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.text.tool_calls import MAX_DEPTH, QUOTE, CallPiece, StreamedCall, ToolCall, cut_tool_call, parse_tool_call

# What the notation is made of, and what models write instead of it.
WORDS = [*"{}[],:=()'\" \n\\\ufdd0é", QUOTE, "a", "b c", "12", "true", "null", "<|", "|>"]
PARTS = [*WORDS, "\ufdd0", "(", ")", "x:", f"y:{QUOTE}", f"{QUOTE},", f"z:{QUOTE}text{QUOTE}"]


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
@given(st.lists(st.sampled_from(PARTS), max_size=16), st.randoms(use_true_random=False), st.booleans())
def test_pieces_and_rest_are_the_whole(parts: list[str], chance: random.Random, cut: bool) -> None:
    raw = "call:f{" + "".join(parts) + chance.choice(["", "}"])
    pieces, call = streamed(raw, *sorted(chance.randrange(len(raw) + 1) for _ in range(8)), cut=cut)
    whole = (cut_tool_call if cut else parse_tool_call)(raw)
    assert (call.name, call.arguments, call.partial) == (whole.name, whole.arguments, whole.partial)
    if call.unsent is not None:
        written = "".join(piece.arguments for piece in pieces) + call.unsent
        assert written == call.partial if call.arguments is None else json.loads(written) == call.arguments
