"""A phone is kept awake while it measures, and is left as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_devices.machine.system import CommandResult, System
from edge_devices.remote.job_monitor import kept_awake


def phone(timeout: str, root: Path, *, android: bool = True) -> tuple[System, list[str]]:
    """A machine that answers `settings get` and Doze's state; and the list of all commands it got."""
    commands: list[str] = []
    if android:
        (root / "system").mkdir()
        (root / "system/build.prop").touch()

    def run(arguments, **_):
        line = " ".join(arguments)
        commands.append(line)
        answers = {"settings get system screen_off_timeout": timeout, "dumpsys deviceidle enabled all": "1"}
        return CommandResult(code=0, output=answers.get(line, "").encode(), errors="")

    return System(root=root, run=run), commands


@pytest.mark.parametrize(
    ("before", "restored"),
    [("30000\n", "settings put system screen_off_timeout 30000"), ("null\n", "settings delete system screen_off_timeout")],
)
def test_the_screen_stays_on_and_the_settings_come_back(before, restored, tmp_path):
    system, commands = phone(before, tmp_path)
    with kept_awake(system) as awake:
        assert awake
        assert "input keyevent KEYCODE_WAKEUP" in commands
        assert "dumpsys deviceidle disable all" in commands
    assert commands[-2:] == [restored, "dumpsys deviceidle enable all"]


def test_other_machines_are_left_alone(tmp_path):
    system, commands = phone("", tmp_path, android=False)
    with kept_awake(system) as awake:
        assert not awake
    assert commands == []
