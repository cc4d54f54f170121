"""Characters are never split and stop strings never leak, whatever the pieces."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.errors import RequestError
from edge_runtime.text.channels import ChannelParser, Event, StopStrings, Text


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
