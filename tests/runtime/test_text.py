"""Characters are never split, whatever the pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.text import TextStream


@given(st.text(), st.integers(1, 5))
def test_any_split_gives_the_same_text(text, size):
    data, stream = text.encode("utf-8", "surrogatepass"), TextStream()
    whole = data.decode("utf-8", "replace")
    pieces = [stream.feed(data[i : i + size]) for i in range(0, len(data), size)]
    assert "".join(pieces) + stream.finish() == whole


def test_half_a_character_waits():
    stream = TextStream()
    assert stream.feed(b"caf\xc3") == "caf"
    assert stream.feed(b"\xa9") == "é"
    assert stream.finish() == ""


def test_unfinished_character_is_marked():
    stream = TextStream()
    stream.feed(b"\xe4\xb8")
    assert stream.finish() == "\ufffd"
