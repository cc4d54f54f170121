"""The state of a machine before and after a run: what disturbs a measurement and what refuses one. Commands of the system."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from edge_devices.machine.state import disturbances, read_state, refusals
from edge_devices.machine.system import CommandResult, run_command
from recordings import recorded


def test_commands_never_raise():
    assert run_command(["no-such-command-at-all"]).code == 127
    assert run_command(["sleep", "5"], seconds=0.05).code == 124
    assert run_command(["cat"], b"given").text == "given"


@pytest.mark.parametrize("descriptor", [1, 2])
def test_a_command_that_floods_an_output_is_ended(descriptor: int, tmp_path: Path) -> None:
    script = f'head -c 3000000 /dev/zero >&{descriptor}; echo on > "$1"'
    done = run_command(["sh", "-c", script, "sh", str(tmp_path / "went")], max_bytes=1000)
    assert (done.code, done.cut, len(done.output)) == (125, True, 1000 if descriptor == 1 else 0)
    assert not (tmp_path / "went").exists()
    assert run_command(["head", "-c", "1000", "/dev/zero"], max_bytes=1000) == CommandResult(code=0, output=bytes(1000))


def test_both_outputs_are_read_at_once_and_an_answer_may_be_left_unread() -> None:
    done = run_command(["sh", "-c", "head -c 300000 /dev/zero >&2; head -c 300000 /dev/zero; exit 3"], bytes(1_000_000))
    assert (done.code, len(done.output), len(done.errors)) == (3, 300_000, 4096)
    assert run_command(["cat"], bytes(1_000_000)).output == bytes(1_000_000)


def test_state_of_a_throttled_board():
    before, after = read_state(recorded("raspberry-pi-5")), read_state(recorded("raspberry-pi-5-denied"))
    assert before.throttled == 0
    assert disturbances(before, after) == ["the board throttled (get_throttled 0x50005)"]
    assert refusals(before, at_battery=False) == []
    assert "throttled now" in refusals(after, at_battery=False)[0].sentence


def test_state_of_a_battery():
    state = read_state(recorded("battery-legion-go"))
    assert (state.charge_percent, state.charger) == (58, None)
    assert refusals(dataclasses.replace(state, charge_percent=97), at_battery=True)
    assert not refusals(dataclasses.replace(state, charge_percent=97), at_battery=False)
    assert disturbances(state, dataclasses.replace(state, charger="ACAD", swap_used=None))
    assert disturbances(dataclasses.replace(state, swap_used=0), dataclasses.replace(state, swap_used=4096))
