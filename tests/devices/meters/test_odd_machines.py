"""Machines that misled a meter: what is read of them, what is refused, and what is said. Values are made up, layouts are the drivers'."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from edge_devices.energy.recorder import Characteristics
from edge_devices.energy.report import make_report
from edge_devices.energy.run_log import LoggedRun, RunLog
from edge_devices.energy.virtual_meters import with_external_meter
from edge_devices.errors import LinkError, MeterError
from edge_devices.meters.base import Finding, Kind, Meter, MeterFacts, MeterState, Scope, Trace
from edge_devices.meters.search import choose_meter, find_meters, no_meter_reason
from edge_devices.remote.snapshot import RecordedSystem, Recording
from edge_devices.remote.transport import AdbTransport
from recordings import FIXTURES, read_recording

SUPPLY = "sys/class/power_supply"


def machine(files: Mapping[str, str]) -> RecordedSystem:
    return RecordedSystem(Recording(files=dict(files)), clock=lambda: 1.0, sleep=lambda _: None)


def findings(files: Mapping[str, str]) -> dict[str, Finding]:
    return {finding.name: finding for finding in find_meters(machine(files))}


def meter_of(result: Mapping[str, Finding], name: str) -> Meter:
    meter = result[name].meter
    assert meter is not None, result[name].reason
    return meter


def watts(result: Mapping[str, Finding], name: str) -> float:
    sample = meter_of(result, name).read()
    assert sample is not None
    return sample.value


def two_batteries(first: str, second: str, online: str = "0") -> dict[str, str]:
    def battery(status: str, power: int) -> str:
        return f"POWER_SUPPLY_TYPE=Battery\nPOWER_SUPPLY_STATUS={status}\nPOWER_SUPPLY_POWER_NOW={power}\n"

    return {
        f"{SUPPLY}/BAT0/uevent": battery(first, 0 if first != "Discharging" else 7_500_000),
        f"{SUPPLY}/BAT1/uevent": battery(second, 7_500_000 if second == "Discharging" else 0),
        f"{SUPPLY}/AC/uevent": f"POWER_SUPPLY_TYPE=Mains\nPOWER_SUPPLY_ONLINE={online}\n",
    }


@pytest.mark.parametrize("resting", ["Not charging", "Unknown", "Full"])
def test_of_two_batteries_one_discharges_and_the_other_rests(resting: str) -> None:
    for statuses in ((resting, "Discharging"), ("Discharging", resting)):
        assert watts(findings(two_batteries(*statuses)), "battery") == pytest.approx(7.5)
    assert "AC supplies power" in findings(two_batteries(resting, "Discharging", online="1"))["battery"].reason
    assert "BAT1 is Charging" in findings(two_batteries("Discharging", "Charging"))["battery"].reason
    assert "only a discharging battery" in findings(two_batteries(resting, resting))["battery"].reason


@pytest.mark.parametrize("sentinel", ["4294967295", "4294967295000"])
def test_an_unknown_power_is_none(sentinel: str) -> None:
    """ACPI's 0xFFFFFFFF, as it is and in micro units."""
    uevent = "POWER_SUPPLY_TYPE=Battery\nPOWER_SUPPLY_STATUS=Discharging\nPOWER_SUPPLY_POWER_NOW="
    assert findings({f"{SUPPLY}/BAT0/uevent": uevent + sentinel})["battery"].state is MeterState.PRESENT
    rest = "\nPOWER_SUPPLY_CURRENT_NOW=1621000\nPOWER_SUPPLY_VOLTAGE_NOW=11712000\n"
    assert watts(findings({f"{SUPPLY}/BAT0/uevent": uevent + sentinel + rest}), "battery") == pytest.approx(1.621 * 11.712)


def ina219(milliamperes: int) -> dict[str, str]:
    values = {"name": "ina219", "power1_input": "2500000", "curr1_input": str(milliamperes), "in1_input": "5000"}
    return {f"sys/class/hwmon/hwmon2/{name}": value for name, value in values.items()}


def test_a_pi_5_is_read_by_its_own_chip_and_a_line_that_charges_by_name_only() -> None:
    pi = read_recording(FIXTURES / "raspberry-pi-5.json")
    pi.files.update(ina219(500))
    chosen = choose_meter(find_meters(RecordedSystem(pi, clock=lambda: 1.0, sleep=lambda _: None)))
    assert chosen is not None
    assert chosen.facts.name == "raspberry-pi:pmic"
    result = findings(ina219(-500))
    assert choose_meter(list(result.values())) is None
    assert "hwmon:ina219:1:reversed: its current is negative" in no_meter_reason(list(result.values()))
    assert watts(result, "hwmon:ina219:1:reversed") == 2.5


@pytest.mark.parametrize("before", [500, -500])
def test_a_line_that_changes_its_direction_stops_the_meter(before: int) -> None:
    recording = Recording(files=ina219(before))
    found = find_meters(RecordedSystem(recording, clock=lambda: 1.0, sleep=lambda _: None))
    (result,) = [f for f in found if f.name.startswith("hwmon:ina219")]
    assert result.meter is not None
    recording.files["sys/class/hwmon/hwmon2/curr1_input"] = "0"
    assert result.meter.read() is not None
    recording.files["sys/class/hwmon/hwmon2/curr1_input"] = str(-before)
    with pytest.raises(MeterError, match="changed its direction"):
        result.meter.read()


@pytest.mark.parametrize(
    ("chip", "labels", "expected", "scope"),
    [
        ("macsmc_hwmon", {"power1": ("AC Input Power", 30.0), "power2": ("Total System Power", 12.5)}, 12.5, Scope.PLATFORM),
        ("zenpower", {"power1": ("SVI2_P_Core", 40.0), "power2": ("SVI2_P_SoC", 5.0)}, 45.0, Scope.PACKAGE),
        ("corsairpsu", {"power1": ("power total", 88.0), "power2": ("power +12v", 70.0)}, 88.0, Scope.EXTERNAL),
    ],
)
def test_units_with_labels_are_read(chip: str, labels: dict[str, tuple[str, float]], expected: float, scope: Scope) -> None:
    folder = "sys/class/hwmon/hwmon3"
    files = {f"{folder}/name": chip}
    for power, (label, figure) in labels.items():
        files |= {f"{folder}/{power}_label": label, f"{folder}/{power}_input": str(round(figure * 1e6))}
    result = findings(files)
    assert watts(result, f"hwmon:{chip}:1") == pytest.approx(expected)
    assert meter_of(result, f"hwmon:{chip}:1").facts.scope is scope
    assert not [name for name in findings({f"{folder}/name": chip, f"{folder}/power1_input": "1"}) if chip in name]


def test_a_recording_that_was_continued_counts_nothing_for_its_pause() -> None:
    """A logger that adds up joules itself, stopped for 20 s in the second of three windows of 5 W."""
    facts = MeterFacts(name="csv", kind=Kind.COUNTER, scope=Scope.EXTERNAL, source="", refresh_s=0.1, resolution=1e-3, poll_s=0.1)
    table, joules, loads = Trace(facts=facts), 0.0, [(10.0, 13.0), (17.0, 22.0)]
    runs = [LoggedRun(variant="plain", repeat=i, start_s=s, end_s=s + 30, emitted_tokens=100) for i, s in enumerate((30.0, 70.0, 110.0))]
    busy = [*loads, *((run.start_s, run.end_s) for run in runs)]
    for step in range(1450):
        time_s = step / 10
        if not 77.0 < time_s < 97.0:
            joules += 0.1 * (5.0 if any(start <= time_s < end for start, end in busy) else 1.0)
            table.times.append(time_s)
            table.values.append(joules)
    log = RunLog(facts=facts, characteristics=Characteristics.expected(facts), trace=table, loads=loads, runs=runs)
    plain = make_report(with_external_meter(log, table)).variants[0]
    assert plain.refused == ["repeat 1: the meter failed: its recording pauses for 20 s"]
    assert plain.watts is not None
    assert plain.watts.value == pytest.approx(5.0, rel=0.01)


def test_a_device_that_is_still_being_authorised_is_no_broken_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adb").write_text("#!/bin/sh\necho 'error: device still authorizing' >&2; exit 1\n")
    (tmp_path / "adb").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(LinkError, match=r"^adb:X is being authorised; unlock the phone"):
        AdbTransport("X").run(["true"])
