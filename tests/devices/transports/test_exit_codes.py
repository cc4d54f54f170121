"""Exit codes that come back inside the output: each is read exactly, and a link that breaks is never taken for a failed command."""

from __future__ import annotations

import subprocess

import pytest

from edge_devices.errors import TransportError
from edge_devices.files.limited_read import parse_integer
from edge_devices.machine.system import CommandResult
from edge_devices.transports.base import FramedCommand, frame_command


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("137", 137), ("9" * 18, 10**18 - 1), ("007", 7)])
def test_digits_are_a_number(text: str, number: int) -> None:
    assert parse_integer(text) == number


@pytest.mark.parametrize("text", ["", "-1", "+1", " 1", "1 ", "1.0", "1_0", "0x1", "１", "²", "9" * 19])
def test_anything_else_is_none(text: str) -> None:
    assert parse_integer(text) is None


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("code", [0, 5, 137])
def test_an_output_cut_anywhere_before_the_end_of_its_code_gives_no_code(separate: bool, code: int) -> None:
    framed = frame_command(["sh", "-c", f"echo out; echo bad >&2; exit {code}"], separate=separate)
    whole = subprocess.run(["sh", "-c", framed.line], capture_output=True, check=False).stdout
    end = whole.index(framed.mark) + len(framed.mark) + len(str(code)) + 1
    assert [framed.parse(whole[:cut], "") for cut in range(end)] == [None] * end
    actual = framed.parse(whole, "")
    assert actual == CommandResult(code=code, output=b"out\n", errors="" if separate else "bad")


@pytest.mark.parametrize("rest", ["x\n", "-1\n", "\n", "1e3\n", "9" * 19 + "\n"])
def test_a_code_that_is_no_number_is_a_broken_link(rest: str) -> None:
    assert FramedCommand("true", b"[mark]").parse(b"out[mark]" + rest.encode(), "") is None


def test_an_argument_with_a_nul_byte_is_refused_among_others() -> None:
    with pytest.raises(TransportError, match="an argument with a NUL byte cannot be passed to a command"):
        frame_command(["echo", "a\0b", "c"])


def test_markers_are_long_and_differ() -> None:
    marks = {frame_command(["true"]).mark for _ in range(50)}
    assert len(marks) == 50
    assert {len(mark) for mark in marks} == {18}
