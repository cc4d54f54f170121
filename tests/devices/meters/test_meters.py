"""Every meter against what real devices print; where a fixture's values are made up, its `source` says so."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
from click.testing import CliRunner

from edge_devices import cli
from edge_devices.cli import main
from edge_devices.energy.report import meter_lines
from edge_devices.energy.virtual_meters import EstimateMeter
from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters import search
from edge_devices.meters.android import parse_dumpsys, parse_rails
from edge_devices.meters.base import Finding, Kind, MeterFacts, MeterState, Scope, Unwrapped, present, usable
from edge_devices.meters.search import choose_meter, find_meters, no_meter_reason
from edge_devices.remote.snapshot import FILES, QUERIES, RecordedSystem, Recording
from recordings import FIXTURES, read_recording, recorded
from simulated_session import SimulatedMachine


def findings(name: str, **changes: str):
    return {f.name: f for f in find_meters(recorded(name, **changes))}


def value(name: str, meter: str) -> float:
    actual = findings(name)[meter]
    assert actual.state is MeterState.USABLE, actual.reason
    return actual.meter.read().value


# Recorded machine, meter, joules or watts, scope.
READINGS = [
    ("rapl-laptop", "rapl:package", 52649.883221, Scope.PACKAGE),  # neither the mmio twin nor core and uncore added
    ("rapl-amd", "rapl:package", 65532.61, Scope.PACKAGE),
    ("rapl-two-sockets", "rapl:package", 10.0, Scope.PACKAGE),
    ("rapl-two-sockets", "rapl:dram", 2.0, Scope.DRAM),
    ("battery-legion-go", "battery", 22.543, Scope.DEVICE),  # the mouse's battery is not in it
    ("battery-dell", "battery", 1.621 * 11.712, Scope.DEVICE),
    ("battery-beside-ups", "battery", 22.543, Scope.DEVICE),
    ("android-oplus", "android:battery", 0.305 * 3.964, Scope.DEVICE),
    ("android-microamperes", "android:battery", 0.123 * 3.964, Scope.DEVICE),
    ("raspberry-pi-5", "raspberry-pi:pmic", 10.799894, Scope.BOARD),
    ("raspberry-pi-4-ina", "hwmon:ina226:1", 4.875, Scope.EXTERNAL),
    ("raspberry-pi-4-ina", "hwmon:ina228:1", 123.456789, Scope.EXTERNAL),
    ("raspberry-pi-4-ina", "hwmon:ina3221:PI:reversed", 5.104 * 0.98, Scope.EXTERNAL),
    ("jetson-orin-nano", "jetson", 6.625, Scope.MODULE),
    ("jetson-nano", "jetson", 3.902, Scope.MODULE),
    ("jetson-agx-orin", "jetson", 0.843 * 6.170 + 0.780 * 3.437 + 4.968 * 0.953, Scope.RAILS),  # without what these supplies feed
    ("jetson-thor", "jetson", 23.0, Scope.MODULE),
    ("apu-and-server", "hwmon:amdgpu:1", 11.042, Scope.PACKAGE),
    ("apu-and-server", "hwmon:amdgpu:2", 28.0, Scope.GPU),
    ("apu-and-server", "hwmon:power_meter:1", 184.0, Scope.PLATFORM),
    ("apu-and-server", "hwmon:ina226_u76:1", 0.85, Scope.EXTERNAL),
    ("apu-and-server", "hwmon:ina226:1", 1.0, Scope.EXTERNAL),
    ("apu-and-server", "hwmon:ina226:1-2", 2.0, Scope.EXTERNAL),
    ("apple-m1", "apple:powermetrics", 1.473, Scope.PACKAGE),
]
# Recorded machine, meter, state, words of the reason or remedy.
REFUSED = [
    ("rapl-denied", "rapl:package", MeterState.PRESENT, "denied"),
    ("rapl-denied", "rapl:package", MeterState.PRESENT, "chmod a+r"),
    ("android-plugged", "android:battery", MeterState.PRESENT, "USB powered"),
    ("android-frozen", "android:battery", MeterState.PRESENT, "UPDATES STOPPED"),
    ("android-old", "android:battery", MeterState.PRESENT, "Unknown get option"),
    ("android-oplus", "android:battery-sysfs", MeterState.PRESENT, "use android:battery"),
    ("android-oplus", "android:powerstats", MeterState.ABSENT, "lists no channels"),
    ("android-pixel-6", "android:powerstats", MeterState.PRESENT, "perfetto failed"),  # the recording has no perfetto
    ("raspberry-pi-5-denied", "raspberry-pi:pmic", MeterState.PRESENT, "usermod -aG video"),
    ("raspberry-pi-4-ina", "raspberry-pi:pmic", MeterState.ABSENT, "senses no current"),
    ("apple-denied", "apple:powermetrics", MeterState.PRESENT, "sudo"),
]


@pytest.mark.parametrize(("machine", "meter", "figure", "scope"), READINGS)
def test_a_recorded_machine_is_read(machine: str, meter: str, figure: float, scope: Scope) -> None:
    assert value(machine, meter) == pytest.approx(figure)
    assert findings(machine)[meter].meter.facts.scope is scope


@pytest.mark.parametrize(("machine", "meter", "state", "words"), REFUSED)
def test_a_meter_that_cannot_be_read_says_why_and_what_to_do(machine: str, meter: str, state: MeterState, words: str) -> None:
    finding = findings(machine)[meter]
    assert finding.state is state
    assert words in f"{finding.reason} {finding.remedy}"


def test_what_else_is_known_of_recorded_meters() -> None:
    assert findings("rapl-laptop")["rapl:platform"].meter.facts.scope is Scope.PLATFORM
    assert "mA" in findings("android-oplus")["android:battery"].meter.facts.notes[0]
    assert "reads lower" in findings("jetson-agx-orin")["jetson"].meter.facts.notes[0]
    assert "hwmon" in findings("jetson-agx-orin")
    chips = findings("raspberry-pi-4-ina")
    assert chips["hwmon:ina226:1"].meter.facts.refresh_s == pytest.approx(0.035)
    assert chips["hwmon:ina228:1"].meter.facts.kind is Kind.COUNTER
    assert not [name for name in chips if "NC" in name]
    broken = findings("rapl-laptop", **{"intel-rapl:0__energy_uj": "soon"})["rapl:package"]
    assert (broken.state, "no number" in broken.reason) == (MeterState.PRESENT, True)


@pytest.mark.parametrize(
    ("before", "after", "counted"), [(65532000000, 5000000, 5.610987), (40000000000, 3000000, None), (3000000, 60000000000, None)]
)
def test_a_rapl_register_that_is_reset_or_leaps_is_refused_and_goes_on(before, after, counted):
    """A second between readings: 5.6 J are a wrap at 65.5 kJ; 25 kJ are a driver that was loaded again, 60 kJ a night asleep."""
    recording = read_recording(FIXTURES / "rapl-amd.json")
    files, now = recording.files, iter(range(1000))
    place = "sys/class/powercap/intel-rapl:0/energy_uj"
    meter = choose_meter(find_meters(RecordedSystem(recording, clock=lambda: float(next(now)))), "rapl:package")
    meter.read()
    files[place] = str(before)
    with contextlib.suppress(MeterError):
        meter.read()
    first = meter.read().value
    files[place] = str(after)
    if counted is None:
        with pytest.raises(MeterError, match="more than any device takes: it was reset; measure again"):
            meter.read()
        first = meter.read().value
        files[place] = str(after + 7_000_000)
        assert meter.read().value - first == pytest.approx(7.0)
    else:
        assert meter.read().value - first == pytest.approx(counted)


def test_psys_below_its_package_is_refused():
    recording = read_recording(FIXTURES / "rapl-laptop.json")
    files = recording.files

    def later(_: float) -> None:
        files["sys/class/powercap/intel-rapl:0/energy_uj"] = str(52649883221 + 500_000)
        files["sys/class/powercap/intel-rapl:1/energy_uj"] = str(99649883221 + 1000)

    actual = {f.name: f for f in find_meters(RecordedSystem(recording, clock=lambda: 1.0, sleep=later))}
    assert actual["rapl:platform"].state is MeterState.PRESENT
    assert "not wired" in actual["rapl:platform"].reason
    assert actual["rapl:package"].state is MeterState.USABLE


def test_registers_wrap_and_refuse_nonsense():
    register = Unwrapped("r", 100)
    assert [register.total(v) for v in (90, 10, 5, 99)] == [90, 110, 205, 299]
    with pytest.raises(MeterError, match=r"outside 0\.\.100"):
        register.total(101)
    counter = Unwrapped("c", None)
    counter.total(7)
    with pytest.raises(MeterError, match="went back from 7 to 6"):
        counter.total(6)


def test_two_batteries_are_summed():
    item = read_recording(FIXTURES / "battery-dell.json").files["sys/class/power_supply/BAT0/uevent"]
    files = {f"sys/class/power_supply/BAT{i}/uevent": item for i in range(2)}
    meter = choose_meter(find_meters(RecordedSystem(Recording(files=files), clock=lambda: 1.0)), "battery")
    assert meter.read().value == pytest.approx(2 * 1.621 * 11.712)


@pytest.mark.parametrize("status", ["Charging", "Full", "Not charging", "Unknown"])
def test_a_battery_that_does_not_discharge_is_refused(status):
    text = read_recording(FIXTURES / "battery-dell.json").files["sys/class/power_supply/BAT0/uevent"].replace("Discharging", status)
    actual = findings("battery-dell", BAT0__uevent=text)["battery"]
    assert actual.state is MeterState.PRESENT
    assert status in actual.reason


def played(name: str) -> tuple[Recording, list[Finding]]:
    """A recording that may change, and what is found on its machine."""
    recording = read_recording(FIXTURES / f"{name}.json")
    return recording, find_meters(RecordedSystem(recording, clock=lambda: 1.0, sleep=lambda _: None))


def test_a_battery_plugged_in_while_measuring_stops_the_meter():
    recording, found = played("battery-legion-go")
    meter = choose_meter(found, "battery")
    recording.files["sys/class/power_supply/ACAD/uevent"] = "POWER_SUPPLY_TYPE=Mains\nPOWER_SUPPLY_ONLINE=1"
    with pytest.raises(MeterError, match="unplug the charger"):
        meter.read()


def sysfs_phone(status: str, online: str) -> RecordedSystem:
    gauge = f"POWER_SUPPLY_TYPE=Battery\nPOWER_SUPPLY_STATUS={status}\nPOWER_SUPPLY_CURRENT_NOW=-312500\nPOWER_SUPPLY_VOLTAGE_NOW=4000000\n"
    files = {"system/build.prop": "", "sys/class/power_supply/battery/uevent": gauge}
    files["sys/class/power_supply/usb/uevent"] = f"POWER_SUPPLY_TYPE=USB\nPOWER_SUPPLY_ONLINE={online}\n"
    return RecordedSystem(Recording(files=files), clock=lambda: 1.0, sleep=lambda _: None)


def test_android_sysfs_gauge():
    actual = {f.name: f for f in find_meters(sysfs_phone("Discharging", "0"))}
    assert actual["android:battery-sysfs"].meter.read().value == pytest.approx(1.25)
    assert "battery" not in actual  # the laptop's reader leaves phones alone
    for status, online in (("Charging", "0"), ("Unknown", "1")):
        (refused,) = [f for f in find_meters(sysfs_phone(status, online)) if f.name == "android:battery-sysfs"]
        assert refused.state is MeterState.PRESENT


def test_android_false_zeros_are_dropped():
    recording, found = played("android-oplus")
    meter = choose_meter(found, "android:battery")
    recording.commands["cmd battery get -f current_now"] = (0, "0\n")
    assert meter.read() is None
    recording.commands["cmd battery get -f current_now"] = (0, "-2147483648\n")
    with pytest.raises(MeterError, match="neither `dumpsys battery` nor perfetto"):
        meter.read()


def test_dumpsys_reads_only_the_services_own_section():
    text = read_recording(FIXTURES / "android-oplus.json").commands["dumpsys battery"][1]
    fields = parse_dumpsys(text)
    assert fields["status"] == "3"
    assert fields["voltage"] == "3964"
    assert "PhoneTemp" not in fields
    assert "voltage" not in parse_dumpsys("Current Battery Service state:\n  status: 3\n[EventLogBuffer] 1\n  voltage: 1\n")
    with pytest.raises(MeterError, match="no section"):
        parse_dumpsys("dumpsys: no such service")


def test_android_rails():
    rails = parse_rails(read_recording(FIXTURES / "android-pixel-6.json").files["sys/bus/iio/devices/iio:device0/energy_value"])
    assert rails["S2M_VDD_CPUCL2"] == 30203502
    assert len(rails) == 8
    meter = findings("android-pixel-6")["android:rails"].meter  # usable while the phone is plugged in
    assert meter.read().value == pytest.approx(sum(rails.values()) * 1e-6 + 166.695977)
    assert meter.facts.kind is Kind.COUNTER


def test_android_rails_that_change_are_refused():
    recording, found = played("android-pixel-6")
    meter = choose_meter(found, "android:rails")
    del recording.files["sys/bus/iio/devices/iio:device1/energy_value"]
    with pytest.raises(MeterError, match="no longer readable"):
        meter.read()


def test_a_ups_beside_the_battery_counts_only_when_it_supplies():
    system = recorded("battery-beside-ups", **{"ups/uevent": "POWER_SUPPLY_TYPE=UPS\nPOWER_SUPPLY_ONLINE=1\n"})
    actual = {f.name: f for f in find_meters(system)}["battery"]
    assert actual.meter is None
    assert "ups supplies power" in actual.reason


def test_estimates_are_never_found_and_always_labelled():
    for path in FIXTURES.glob("*.json"):
        assert not [f for f in findings(path.stem).values() if f.meter and f.meter.facts.is_estimate]
    now = iter([0.0, 10.0])
    busy = iter([0.0, 4.0])
    meter = EstimateMeter(System(clock=lambda: next(now)), idle_watts=2.0, core_watts=5.0, busy_seconds=lambda: next(busy))
    assert meter.read().value == 40.0
    assert meter.facts.to_json()["estimate"] is True
    with pytest.raises(MeterError, match="power model must be 0 to 1000"):
        EstimateMeter(System(), idle_watts=-1, core_watts=1)


def test_choosing():
    actual = find_meters(recorded("rapl-denied"))
    assert choose_meter(actual) is None
    with pytest.raises(MeterError, match="is present: denied"):
        choose_meter(actual, "rapl:package")
    with pytest.raises(MeterError, match="no meter 'x' on this machine, usable: none"):
        choose_meter(actual, "x")


@pytest.fixture
def meters_of(monkeypatch) -> Callable[..., str]:
    """Runs `edge-devices meters --measure` on a simulated machine."""

    def shown(machine: SimulatedMachine, *words: str) -> str:
        for name, double in {"System": lambda: machine.system, "find_meters": lambda _: [usable(machine)]}.items():
            monkeypatch.setattr(cli, name, double)
        result = CliRunner().invoke(main, ["meters", "--measure", *words])
        assert result.exit_code == 0, result.output
        return result.output

    return shown


def test_what_meters_do_here_is_measured_on_request(meters_of):
    machine, broken = SimulatedMachine(refresh_s=0.001), SimulatedMachine(refresh_s=0.5)
    broken.read = lambda: None
    assert "measured: new every" in meters_of(machine)
    assert "no energy meter" not in meters_of(machine)
    assert json.loads(meters_of(machine, "--json"))["meters"][0]["measured"]["refresh_s"] > 0
    assert "showed 0 new values" in meters_of(broken)


def test_the_profiles_are_listed():
    text = CliRunner().invoke(main, ["profiles"]).output
    assert "raspberry-pi-5" in text
    assert "8.5 to 11.5 GB/s, measured by others" in text
    assert json.loads(CliRunner().invoke(main, ["profiles", "--json"]).output)["tensor-g5"]["draft_length"] == [0, 6]


def test_meters_command_on_this_machine():
    record = json.loads(CliRunner().invoke(main, ["meters", "--json"]).stdout)
    assert {"name", "state", "reason", "remedy", "facts"} <= record["meters"][0].keys()
    assert CliRunner().invoke(main, ["meters"]).exit_code == 0


def test_listing_says_why():
    text = "\n".join(meter_lines(find_meters(recorded("rapl-denied"))))
    assert "present  rapl:package: denied to this user" in text
    assert text.startswith(
        "no energy meter on this machine can be used now; what stands in the way of rapl:package, rapl:platform is below"
    )
    assert "--meter external" in text
    assert "no energy meter" not in "\n".join(meter_lines(find_meters(recorded("rapl-laptop"))))


def test_a_graphics_board_is_read_by_name_only_and_a_denied_meter_is_named():
    class Board:
        facts = MeterFacts(name="nvml:0", kind=Kind.COUNTER, scope=Scope.GPU, source="", refresh_s=0.1, resolution=0.001, poll_s=0.1)

    findings = [usable(Board()), present("rapl:package", "denied to this user", "sudo chmod a+r FILES")]
    assert choose_meter(findings) is None
    assert choose_meter(findings, "nvml:0").facts.name == "nvml:0"
    reason = no_meter_reason(findings)
    assert "rapl:package: denied to this user; sudo chmod a+r FILES" in reason
    assert "--meter nvml:0" in reason
    assert no_meter_reason([]) == "no energy meter on this machine"


def machines() -> list[str]:
    return sorted(path.stem for path in FIXTURES.glob("*.json") if read_recording(path).platform == "linux")


@pytest.mark.parametrize("name", machines())
def test_a_source_names_all_that_its_meters_read(name: str) -> None:
    """A device is read from afar: nothing but these files and commands is fetched."""
    whole = read_recording(FIXTURES / f"{name}.json")
    files = {path: text for path, text in whole.files.items() if path == "system/build.prop" or is_named(path)}
    commands = {command: answer for command, answer in whole.commands.items() if tuple(command.split()) in QUERIES}
    fetched = RecordedSystem(
        Recording(files=files, denied=tuple(filter(is_named, whole.denied)), commands=commands), clock=lambda: 1.0, sleep=lambda _: None
    )
    assert [finding.to_json() for finding in find_meters(fetched)] == [finding.to_json() for finding in findings(name).values()]


def is_named(path: str) -> bool:
    return any(path.count("/") == pattern.count("/") and fnmatchcase(path, pattern) for pattern in FILES)


def test_a_source_that_fails_is_listed_by_the_name_of_its_meters(monkeypatch):
    """Not by its module's: a phone's gauge is no laptop's battery."""

    def broken(_: System) -> list[object]:
        raise MeterError("gone")

    monkeypatch.setattr(search, "SOURCES", tuple(replace(source, find=broken) for source in search.SOURCES))
    names = [finding.name for finding in find_meters(System())]
    assert names == [source.name for source in search.SOURCES]
    assert len(set(names)) == len(names)
    assert {"battery", "android:battery", "apple:powermetrics", "nvml"} < set(names)
    assert all(finding.state is MeterState.PRESENT and finding.reason == "gone" for finding in find_meters(System()))
