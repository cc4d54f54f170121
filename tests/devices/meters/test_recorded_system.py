"""Recordings of machines: they replay as the machine, hold nothing private, and are refused when damaged."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from edge_devices.cli import main
from edge_devices.machine.state import read_state
from edge_devices.machine.system import CommandResult, System
from edge_devices.meters.recorded_system import RecordedSystem, Recording, record, write_recording
from edge_devices.meters.search import find_meters
from recordings import FIXTURES, read_recording, recorded


def test_recordings_round_trip_and_hold_nothing_private(tmp_path):
    for name in ("sys/class/power_supply/BAT0", "proc"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "sys/class/power_supply/BAT0/uevent").write_text("POWER_SUPPLY_TYPE=Battery\nPOWER_SUPPLY_SERIAL_NUMBER=1234\n")
    (tmp_path / "proc/cpuinfo").write_text("model name: x\nSerial\t\t: 10000000abcdef\n")
    path = write_recording(tmp_path / "out", record(System(root=tmp_path)))
    assert "1234" not in path.read_text()
    assert "abcdef" not in path.read_text()
    assert read_recording(path).files["sys/class/power_supply/BAT0/uevent"] == "POWER_SUPPLY_TYPE=Battery"
    assert [p.name for p in path.parent.iterdir()] == ["recording.json"]


@pytest.mark.parametrize("name", sorted(path.stem for path in FIXTURES.glob("*.json")))
def test_what_probe_records_on_a_device_replays_as_that_device(name, tmp_path):
    """The files of each fixture as a tree of real files, recorded by the command's own code, then read in the device's place."""
    fixture = read_recording(FIXTURES / f"{name}.json")

    class Device(System):
        def text(self, path: str) -> str:
            if path in fixture.denied:
                raise PermissionError(13, "Permission denied", path)
            return super().text(path)

    for path in (*fixture.files, *fixture.denied):
        (tmp_path / "root" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / path).write_text(fixture.files.get(path, "never read"))
    device = Device(root=tmp_path / "root", platform=fixture.platform, run=recorded(name).run, clock=lambda: 1.0, sleep=lambda _: None)
    again = RecordedSystem(read_recording(write_recording(tmp_path / "out", record(device))), clock=lambda: 1.0, sleep=lambda _: None)

    def readings(system):
        return [(f.name, f.state, f.reason, f.meter.read() if f.meter else None) for f in find_meters(system)]

    assert readings(again) == readings(device)
    assert read_state(again) == read_state(device)


def test_powerstats_are_cut_to_their_channels():
    def run(arguments, *_):
        return CommandResult(
            code=0, output=b"ChannelId: 3, ChannelName: A, x\nsome.private.app: 4\n" if "powerstats" in arguments else b"ok"
        )

    (actual,) = [v for k, v in record_android(run).items() if "powerstats" in k]
    assert actual == (0, "ChannelId: 3, ChannelName: A, x")


def record_android(run):
    class Phone(RecordedSystem):
        pass

    phone = Phone(Recording(files={"system/build.prop": ""}))
    object.__setattr__(phone, "run", run)
    return record(phone).commands


def test_probe_command(tmp_path):
    result = CliRunner().invoke(main, ["probe", "--record", str(tmp_path / "device")])
    assert result.exit_code == 0, result.output
    assert read_recording(tmp_path / "device" / "recording.json").platform
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(main, ["probe", "--record", str(tmp_path / "file" / "device")])
    assert result.exit_code == 1
    assert "cannot be written" in result.output
