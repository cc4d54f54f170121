"""The state of a machine before and after a run: what disturbs a measurement and what refuses one. Commands of the system."""

from __future__ import annotations

import dataclasses

from edge_devices.machine.state import disturbances, read_state, refusals
from edge_devices.machine.system import run_command
from recordings import recorded


def test_commands_never_raise():
    assert run_command(["no-such-command-at-all"]).code == 127
    assert run_command(["sleep", "5"], seconds=0.05).code == 124
    assert run_command(["cat"], b"given").text == "given"


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
