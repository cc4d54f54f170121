"""What the terminal chat paints and keeps: Markdown in pieces of any size, the history, figures that fit."""

from __future__ import annotations

import re
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from edge_runtime.cli.terminal import MAX_MESSAGES, History, MarkdownPainter, TypedInput, short_summary
from edge_runtime.session.monitor import DecodeStats

ANSI = re.compile("\x1b\\[[0-9;]*m")


def painted(*pieces: str) -> str:
    painter = MarkdownPainter()
    return "".join(map(painter.feed, pieces)) + painter.finish()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain *text* 2*3\n", "plain *text* 2*3\n"),
        ("a **bold** word", "a \x1b[0m\x1b[1mbold\x1b[0m word"),
        ("call `f(**x)` now", "call \x1b[36mf(**x)\x1b[0m now"),
        ("## Title\ntext", "\x1b[1;4mTitle\x1b[0m\ntext"),
        ("- one\n  * two\n", "• one\n  • two\n"),
        ("```python\n- x = **y\n```\nend", "\x1b[36m- x = **y\n\x1b[0mend"),
        ("open **bold\nnext", "open \x1b[0m\x1b[1mbold\x1b[0m\nnext"),
        ("#hash and #", "#hash and #"),
    ],
)
def test_markdown_is_painted(text, shown):
    assert painted(text) == shown


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(alphabet="ab `*#-\n", max_size=6), max_size=12))
@example(pieces=["    ", "- "])
def test_pieces_do_not_matter_and_no_letter_is_lost(pieces):
    whole = painted("".join(pieces))
    assert painted(*pieces) == whole
    letters = re.sub("[^ab]", "", "".join(pieces))
    fences = "```" in "".join(pieces)  # the language after a fence is not shown
    assert fences or re.sub("[^ab]", "", ANSI.sub("", whole)) == letters


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(alphabet="ab`*- \n日", max_size=9), max_size=12), st.integers(3, 12))
def test_lines_break_between_words(pieces, columns):
    painter = MarkdownPainter(columns)
    broken = ANSI.sub("", "".join(map(painter.feed, pieces)) + painter.finish())
    whole = ANSI.sub("", painted(*pieces))
    assert broken.split() == whole.split() or any(cell_len(word) >= columns for word in whole.split()), "words stay whole"
    assert re.sub(r"\s", "", broken) == re.sub(r"\s", "", whole)
    if "```" not in "".join(pieces):
        wide = [line for line in broken.split("\n") if cell_len(line.rstrip()) > columns and not line.startswith((" ", "•"))]
        assert not [line for line in wide if len(line.split()) > 1 and not any(cell_len(word) >= columns for word in line.split())]


def test_what_accepted_drafts_brought_is_green():
    painter = MarkdownPainter()
    pieces = [("A ", False), ("stack `is", True), ("` **a", False), ("** list", True)]
    shown = "".join(painter.feed(text, accepted=accepted) for text, accepted in pieces) + painter.finish()
    assert ANSI.sub("", shown) == "A stack is a list"
    assert re.findall("\x1b\\[32m([^\x1b]*)", shown) == ["stack ", "is", " list"]


@example(pieces=[("---", False), (" ", True)], columns=3)
@example(pieces=[("*", False), ("aa", False), ("bbb", True)], columns=3)
@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.text(alphabet="ab`*#- \n", max_size=6), st.booleans()), max_size=12), st.none() | st.integers(3, 12))
def test_green_changes_no_text(pieces, columns):
    painter, plain = MarkdownPainter(columns), MarkdownPainter(columns)
    green = "".join(painter.feed(text, accepted=accepted) for text, accepted in pieces) + painter.finish()
    assert ANSI.sub("", green) == ANSI.sub("", "".join(plain.feed(text) for text, _ in pieces) + plain.finish())


def test_a_code_block_keeps_its_lines():
    painter = MarkdownPainter(10)
    text = painter.feed("one two three\n```\na line that is long\n```\n") + painter.finish()
    assert ANSI.sub("", text) == "one two\nthree\na line that is long\n"


def test_tab_completes_commands_and_files(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "fo.txt").touch()
    typed = TypedInput(None, ["/save", "/set", "/stats"])
    line = SimpleNamespace(get_line_buffer=lambda: "")
    monkeypatch.setattr(typed, "_readline", line)

    def completions(word: str, before: str = "") -> list[str]:
        monkeypatch.setattr(line, "get_line_buffer", lambda: before + word)
        return list(iter(map(partial(typed._completion, word), count()).__next__, None))

    assert completions("/s") == ["/save ", "/set ", "/stats "]
    assert completions("/x") == []
    assert completions(f"{tmp_path}/fo", before="/save ") == [f"{tmp_path}/fo.txt", f"{tmp_path}/folder/"]
    assert completions(f"{tmp_path}/nowhere/", before="/save ") == []


def test_the_history_is_cut_and_survives_a_broken_file(tmp_path):
    history = History(tmp_path / "state" / "history.jsonl")
    assert history.load() == []
    for number in range(2 * MAX_MESSAGES + 1):
        history.add(f"{number}\nline")
    assert len(history.load()) == MAX_MESSAGES
    assert history.load()[-1] == f"{2 * MAX_MESSAGES}\nline"
    assert len((tmp_path / "state" / "history.jsonl").read_text().splitlines()) == MAX_MESSAGES
    (tmp_path / "state" / "history.jsonl").write_text("{broken")
    assert history.load() == []
    (tmp_path / "a file").write_text("")
    History(tmp_path / "a file" / "history.jsonl").add("nowhere")


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 200])
def test_figures_fit(columns):
    stats = DecodeStats(tokens=1000, decode_seconds=10.0, rounds=300)
    line = short_summary(stats, columns)
    assert line.startswith("1000 tokens, 100.0 tok/s")
    assert len(line) <= max(columns, len("1000 tokens, 100.0 tok/s"))
