"""Looking at a device from afar, what is refused before a run, and what is named after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from edge_devices.children import module_command
from edge_devices.errors import MeasurementError
from edge_devices.machine.state import DeviceState
from edge_devices.remote.job_monitor import STILL_CHARGING, JobHistory, StateSample, find_incidents, main, read_job_history
from edge_devices.remote.jobs import JobState, JobStatus
from edge_devices.remote.snapshot import DeviceSnapshot, preflight_refusals, preflight_warnings, take_snapshot
from edge_devices.remote.transport import AdbTransport
from fake_adbd import FakeAdbd
from local_transport import LocalTransport
from polling import wait

FINISHED = JobStatus(state=JobState.FINISHED, exit_code=0)


def test_a_look_at_a_phone(daemon: FakeAdbd) -> None:
    phone = daemon.phone
    phone.battery(usb=True, level=41, celsius=33.5)
    phone.says("dumpsys deviceidle enabled all", "1\n")
    phone.says("dumpsys thermalservice", "IsStatusOverride: false\nThermal Status: 1\n")
    phone.write("/sys/devices/system/cpu/cpufreq/policy0/scaling_cur_freq", "1800000\n")
    snapshot = take_snapshot(AdbTransport(daemon.serial))
    assert (snapshot.model, snapshot.android, snapshot.frozen, snapshot.state.clock_mhz) == ("Fake One", True, False, 1800.0)
    assert (snapshot.state.charger, snapshot.state.charge_percent, snapshot.state.temperature_c, snapshot.state.thermal_status) == (
        "USB",
        41,
        33.5,
        1,
    )
    assert (snapshot.state.governors, snapshot.state.frequency_caps) == (("schedutil",), (2400000,))
    assert snapshot.architecture
    assert snapshot.free_bytes
    assert snapshot.memory_available
    output = " ".join(preflight_warnings(snapshot, model_bytes=1 << 50, at_battery=False))
    for words in ("thermal status is light", "USB charges the phone", "schedutil", "read from storage repeatedly"):
        assert words in output
    assert "oze" not in output, "the run itself keeps the phone awake"


def test_what_a_phone_does_not_say_is_named_before_the_run(daemon: FakeAdbd) -> None:
    daemon.phone.says("dumpsys battery", "no such service\n")
    daemon.phone.says("dumpsys thermalservice", "\n")
    (daemon.phone.root / "system/bin/df").unlink(missing_ok=True)
    (daemon.phone.root / "system/bin/df").write_text("#!/system/bin/sh\necho none\n")
    (daemon.phone.root / "system/bin/df").chmod(0o755)
    snapshot = take_snapshot(AdbTransport(daemon.serial))
    assert snapshot.free_bytes is None
    assert preflight_refusals(snapshot, platform="", at_battery=False) == []
    output = " ".join(preflight_warnings(snapshot, model_bytes=1, at_battery=False))
    for words in ("not known: the free space on the device", "whether Android throttles", "charge and charger"):
        assert words in output


def test_a_pi_whose_firmware_does_not_answer(daemon: FakeAdbd) -> None:
    phone = daemon.phone
    (phone.root / "system/build.prop").unlink()
    (phone.root / "proc/device-tree").mkdir()
    (phone.root / "proc/device-tree/model").write_text("Raspberry Pi 4 Model B Rev 1.4")
    output = " ".join(preflight_warnings(take_snapshot(AdbTransport(daemon.serial)), model_bytes=1, at_battery=False))
    assert "whether the board throttles" in output
    phone.says("vcgencmd get_throttled", "throttled=0x50000\n")
    output = " ".join(preflight_warnings(take_snapshot(AdbTransport(daemon.serial)), model_bytes=1, at_battery=False))
    assert "the board throttled before" in output


def test_a_frozen_battery_service_is_seen(daemon: FakeAdbd) -> None:
    daemon.phone.says("dumpsys battery", "Current Battery Service state:\n  (UPDATES STOPPED -- use 'reset' to restart)\n  level: 100\n")
    snapshot = take_snapshot(AdbTransport(daemon.serial))
    assert snapshot.frozen
    assert "reset" in " ".join(preflight_refusals(snapshot, platform="", at_battery=True))
    assert preflight_refusals(snapshot, platform="", at_battery=False) == []


def test_a_look_at_this_machine(tmp_path: Path) -> None:
    transport = LocalTransport(tmp_path)
    snapshot = take_snapshot(transport)
    assert not snapshot.android
    assert snapshot.memory_available
    assert preflight_refusals(snapshot, platform="", at_battery=False) == []


def snapshot_with(**changes: object) -> DeviceSnapshot:
    state = {k: changes.pop(k) for k in list(changes) if k in DeviceState.__dataclass_fields__}
    values = {
        "model": "",
        "architecture": "aarch64",
        "android": True,
        "state": DeviceState(**state),
        "free_bytes": 1 << 40,
        "memory_available": 1 << 40,
        "frozen": False,
        "system": None,
    }
    return DeviceSnapshot(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "x86_64"}, "is for android-arm64, but the device's processor is x86_64"),
        ({"free_bytes": 1 << 20}, "MB are free"),
        ({"charge_percent": 7}, "is at 7 %"),
        ({"temperature_c": 46.0}, "let it cool"),
        ({"thermal_status": 3}, "thermal status severe"),
        ({"throttled": 0x50005}, "throttled now"),
        ({"cooling": ("thermal-cpufreq-0",)}, "the processor is throttled now (thermal-cpufreq-0)"),
    ],
)
def test_what_is_refused(changes: dict[str, object], words: str) -> None:
    assert words in " ".join(preflight_refusals(snapshot_with(**changes), platform="android-arm64", at_battery=False))


def test_energy_at_the_battery_wants_it_unplugged() -> None:
    plugged = snapshot_with(charger="USB", charge_percent=60)
    assert "unplug it" in " ".join(preflight_refusals(plugged, platform="android-arm64", at_battery=True))
    assert preflight_refusals(plugged, platform="android-arm64", at_battery=True, waits_for_unplugging=True) == []
    assert preflight_refusals(plugged, platform="android-arm64", at_battery=False) == []
    assert "at 97 %" in " ".join(preflight_refusals(snapshot_with(charge_percent=97), platform="android-arm64", at_battery=True))


def history_of(*states: DeviceState, every: float = 5.0) -> JobHistory:
    return JobHistory(samples=tuple(StateSample(t=every * i, state=state, memory=10_000_000) for i, state in enumerate(states)), ended=True)


CALM = DeviceState(charge_percent=60, thermal_status=0, frequency_caps=(1000,))


def test_heat_charging_and_caps_are_named_with_their_time() -> None:
    hot, plugged, capped = replace(CALM, thermal_status=2), replace(CALM, charger="USB"), replace(CALM, frequency_caps=(800,))
    output = find_incidents(history_of(CALM, hot, CALM, plugged, CALM, capped, CALM, capped), FINISHED)
    assert output == [
        "after 5 s: Android throttled because of heat (thermal status moderate)",
        "after 15 s: the power source changed from battery to USB",
        "after 20 s: the power source changed from USB to battery",
        "after 25 s: the processor's frequency cap changed (3 times)",
    ]


HOT, BOARD = replace(CALM, thermal_status=3), DeviceState(throttled=0)
LOST = replace(CALM, thermal_status=None, unknown=("whether Android throttles",))
THROTTLED = replace(BOARD, throttled=0x50005)


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ((CALM, CALM, replace(CALM, charge_percent=59)), []),
        ((HOT, HOT), ["after 0 s: Android throttled because of heat (thermal status severe) (2 times)"]),
        ((CALM, LOST, LOST), ["after 5 s: no longer known: whether Android throttles"]),
        ((BOARD, THROTTLED, THROTTLED), ["after 5 s: the board throttled (get_throttled 0x50005) (2 times)"]),
    ],
)
def test_what_is_told_of_a_run(states: tuple[DeviceState, ...], told: list[str]) -> None:
    assert find_incidents(history_of(*states), FINISHED) == told


def test_a_run_that_was_put_aside_is_named() -> None:
    history = JobHistory(samples=tuple(StateSample(t=t, state=CALM, memory=None) for t in (0, 5, 10, 15, 100, 105)), ended=True)
    assert find_incidents(history, FINISHED) == ["after 15 s: the device suspended the run"]


def test_ends_are_named() -> None:
    restarted, died = JobStatus(state=JobState.RESTARTED), JobStatus(state=JobState.DIED)
    assert "the device restarted after 5 s or more" in find_incidents(history_of(CALM, CALM), restarted)[0]
    empty = replace(CALM, charge_percent=2)
    assert "the battery ran empty: 2 % in the last sample" in find_incidents(history_of(CALM, empty), restarted)[0]
    assert "the device restarted" in find_incidents(history_of(CALM, replace(empty, charger="AC")), restarted)[-1]
    assert "to reclaim memory; 10.0 MB of memory" in find_incidents(history_of(CALM), died)[0]
    killed = JobStatus(state=JobState.FINISHED, exit_code=137)
    assert find_incidents(history_of(CALM), killed) == find_incidents(history_of(CALM), died)
    plenty = JobHistory(samples=(StateSample(t=0.0, state=CALM, memory=23_100_000_000, free=9_000_000_000),), ended=False)
    assert find_incidents(plenty, killed)[0].startswith(
        "the run was killed from outside; 23.10 GB of memory and 9.00 GB of the disk were available in the last sample"
    )
    assert "crashed (SIGSEGV)" in find_incidents(plenty, JobStatus(state=JobState.FINISHED, exit_code=139))[0]
    full = JobStatus(state=JobState.FINISHED, exit_code=1, disk_full=True)
    assert "disk was full" in find_incidents(plenty, full)[0]
    wrong = JobStatus(state=JobState.FINISHED, exit_code=1, log=("Error: no watts", ""))
    assert find_incidents(plenty, wrong) == ["it ended with an error: Error: no watts"]
    assert "restarted" in find_incidents(JobHistory(samples=(), ended=False), restarted)[0]


def test_a_watch_runs_a_command_and_outlives_its_end(tmp_path: Path) -> None:
    watch = tmp_path / "watch"
    looked = 'while test "$(grep -c look "$1")" -lt 4; do sleep 0.05; done; exit 4'
    assert main([str(watch), "--every", "0.1", "--", "sh", "-c", looked, "sh", str(watch)]) == 4
    history = read_job_history(watch)
    assert history.ended
    assert len(history.samples) >= 4
    # A busy machine may let the watch itself wait.
    output = [text for text in find_incidents(history, FINISHED) if "suspended" not in text]
    assert all("swapped" in text for text in output)
    whole = watch.read_text()
    (tmp_path / "cut").write_text(whole[: len(whole) // 2])
    assert not read_job_history(tmp_path / "cut").ended


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_loses_the_watch_and_not_the_run(tmp_path: Path) -> None:
    assert main(["/dev/full", "--every", "0.1", "--", "sh", "-c", 'sleep 0.5; touch "$1"', "sh", str(tmp_path / "ran")]) == 0
    assert (tmp_path / "ran").exists()


def test_ending_the_watch_ends_the_command(tmp_path: Path) -> None:
    words = [*module_command("edge_devices.remote.job_monitor"), str(tmp_path / "watch"), "--", "sleep", "60"]
    with subprocess.Popen(words, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}) as process:
        assert wait(lambda: (tmp_path / "watch").exists() and "begin" in (tmp_path / "watch").read_text())
        process.terminate()
        assert process.wait(timeout=120) == 128 + 15
    assert read_job_history(tmp_path / "watch").ended


def test_a_device_that_stays_on_its_charger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("edge_devices.remote.job_monitor.MAX_WAIT_SECONDS", 0.1)
    monkeypatch.setattr("edge_devices.remote.job_monitor.read_state", lambda _system: DeviceState(charger="USB"))
    assert main([str(tmp_path / "watch"), "--wait-unplugged", "--", "touch", str(tmp_path / "ran")]) == STILL_CHARGING
    assert "was still charging" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "line", ["{}", "nonsense", '{"kind": "look", "t": 1, "memory": null, "state": {"other": 1}}', '{"kind": "look", "t": "x"}']
)
def test_a_damaged_watch_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "watch").write_text(json.dumps({"kind": "begin", "t": 0}) + f"\n{line}\n")
    with pytest.raises(MeasurementError, match="line 2 is not a record of the job monitor"):
        read_job_history(tmp_path / "watch")
