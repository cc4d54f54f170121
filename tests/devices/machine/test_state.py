"""The state of a machine before and after a run: what disturbs a measurement and what refuses one. Commands of the system."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from edge_devices.files.typed_json import from_json
from edge_devices.machine.state import DeviceState, disturbances, read_state, refusals, warnings
from edge_devices.machine.system import CommandResult, System, run_command
from edge_devices.remote.snapshot import RecordedSystem, Recording
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


GOVERNOR = {"sys/devices/system/cpu/cpufreq/policy0/scaling_governor": "performance"}
ZONE = {"sys/class/thermal/thermal_zone0/temp": "40000", "proc/meminfo": "SwapTotal: 0 kB\nSwapFree: 0 kB\n"}
BATTERY = "Current Battery Service state:\n  USB powered: false\n  level: 60\n  temperature: 310\n"
PI_4 = {"proc/device-tree/model": "Raspberry Pi 4 Model B Rev 1.4"}
PHONE = {"system/build.prop": ""}


def machine(files: dict[str, str], commands: dict[str, tuple[int, str]] | None = None) -> System:
    """A machine of these files and answers, with whatever else should be known."""
    recording = Recording(files={**GOVERNOR, **ZONE, **files}, commands=commands or {})
    return RecordedSystem(recording, clock=lambda: 1.0, sleep=lambda _: None)


def phone(battery: str = BATTERY, thermal: str = "Thermal Status: 0") -> System:
    return machine(PHONE, {"dumpsys battery": (0, battery), "dumpsys thermalservice": (0, thermal)})


@pytest.mark.parametrize(
    ("system", "words"),
    [
        (machine(PI_4, {"vcgencmd get_throttled": (255, "Can't open device file: /dev/vcio")}), "/dev/vcio; vcgencmd needs"),
        (machine(PI_4), "whether the board throttles (vcgencmd is not installed"),
        (machine(PI_4, {"vcgencmd get_throttled": (0, "throttled=")}), "whether the board throttles"),
        (machine(PI_4, {"vcgencmd get_throttled": (0, "throttled=0x50000")}), "the board throttled before (get_throttled 0x50000)"),
        (machine({}), "whether the processor throttles (this system has no counter of it)"),
        (phone(thermal=""), "whether Android throttles"),
        (phone("error: closed"), "charge and charger (`dumpsys battery` has no section"),
        (phone(BATTERY.replace("level", "volume")), "the battery's charge"),
        (machine({"sys/class/power_supply/BAT0/uevent": "POWER_SUPPLY_TYPE=Battery"}), "the battery's charge"),
    ],
)
def test_what_is_not_known_is_said(system, words):
    assert words in " ".join(warnings(read_state(system)))


@pytest.mark.parametrize(
    "system",
    [
        machine(PI_4, {"vcgencmd get_throttled": (0, "throttled=0x0")}),
        machine({"sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "3"}),
        machine({"sys/class/thermal/cooling_device0/type": "cpufreq-cpu0", "sys/class/thermal/cooling_device0/cur_state": "0"}),
        phone(),
    ],
)
def test_where_all_is_known_nothing_is_said(system):
    assert warnings(read_state(system)) == []
    assert refusals(read_state(system), at_battery=False) == []


def test_vcgencmd_outside_the_path_is_found():
    state = read_state(machine(PI_4, {"/opt/vc/bin/vcgencmd get_throttled": (0, "throttled=0x5")}))
    assert "throttled now" in refusals(state, at_battery=False)[0].sentence


@pytest.mark.parametrize("kind", ["Processor", "thermal-cpufreq-0", "cpufreq-cpu2", "intel_powerclamp", "thermal-idle-0"])
def test_a_cooling_device_that_slows_the_processor_counts_as_throttling(kind):
    files = {"sys/class/thermal/cooling_device7/type": kind, "sys/class/thermal/cooling_device7/cur_state": "2"}
    slowed = read_state(machine(files))
    assert refusals(slowed, at_battery=False)[0].sentence == f"the processor is throttled now ({kind}): let it cool"
    calm = dataclasses.replace(slowed, cooling=())
    for before, after in ((slowed, calm), (calm, slowed), (slowed, slowed)):
        assert disturbances(before, after) == [f"the processor throttled ({kind})"]
    assert slowed.is_warm


@pytest.mark.parametrize("kind", ["pwm-fan", "Fan", "LCD", "TCC Offset", "iwlwifi"])
def test_fans_and_displays_slow_no_processor(kind):
    files = {"sys/class/thermal/cooling_device7/type": kind, "sys/class/thermal/cooling_device7/cur_state": "2"}
    assert read_state(machine(files)).cooling == ()


def test_a_processor_that_counts_its_throttling():
    counter = "sys/devices/system/cpu/cpu{}/thermal_throttle/{}_throttle_count"
    files = {counter.format(n, kind): "4" for n in (0, 1) for kind in ("core", "package")}
    before = read_state(machine(files))
    after = read_state(machine({**files, counter.format(1, "core"): "5"}))
    assert (before.throttle_count, after.throttle_count) == (16, 17)
    assert disturbances(before, after) == ["the processor throttled because of heat"]
    assert disturbances(after, after) == []


@pytest.mark.parametrize(("before", "after"), [(3, 3), (3, 0), (0, 3), (2, 2)])
def test_a_phone_that_is_hot_at_either_end_was_throttled(before, after):
    states = [read_state(phone(thermal=f"Thermal Status: {status}")) for status in (before, after)]
    assert any("Android throttled because of heat" in text for text in disturbances(*states))


def test_clock_and_temperature_are_read():
    policy = "sys/devices/system/cpu/cpufreq/policy{}/scaling_cur_freq"
    state = read_state(machine({policy.format(0): "1800000", policy.format(4): "2400000", "sys/class/thermal/thermal_zone1/temp": "61500"}))
    assert (state.clock_mhz, state.temperature_c) == (2400.0, 61.5)
    assert read_state(machine({"proc/cpuinfo": "cpu MHz\t\t: 2100.5\ncpu MHz\t\t: 800.0\n"})).clock_mhz == 2100.5


def test_a_state_of_an_earlier_version_is_read():
    assert from_json(DeviceState, {"throttled": 0, "governors": []}, "state", exact=True) == DeviceState(throttled=0)
