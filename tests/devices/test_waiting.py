"""Waits: a bar in a terminal, nothing elsewhere."""

from __future__ import annotations

import contextlib
import io

import pytest

from edge_devices.waiting import silent_wait, terminal_wait


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_what_is_done_and_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with contextlib.redirect_stderr(shown), terminal_wait("measuring [what]") as report:
        report(0.5, "idle, 30 s")
    text = shown.getvalue()
    assert "measuring [what]: idle, 30 s" in text, "brackets are no markup"
    assert "0:00:0" in text
    assert text.endswith("\x1b[2K"), "the bar is removed at the end"


def test_nothing_is_written_without_a_terminal() -> None:
    for stderr in (io.StringIO(), None):
        for wait in (terminal_wait, silent_wait):
            with contextlib.redirect_stderr(stderr), wait("measuring") as report:
                report(0.5)
        assert stderr is None or stderr.getvalue() == ""
