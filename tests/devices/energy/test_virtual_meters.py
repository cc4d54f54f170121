"""Estimates and replayed recordings: their figures, their names, their labels; and the clocks of external meters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_devices.energy.external.table import import_csv
from edge_devices.energy.live import EnergyWatch, run_energy
from edge_devices.energy.report import head_lines, make_report
from edge_devices.energy.run_log import write_log
from edge_devices.energy.virtual_meters import EstimateMeter, ReplayMeter, clock_offset, virtual_meter
from edge_devices.errors import DeviceError, MeasurementError, MeterError
from edge_devices.files.typed_json import from_json
from edge_devices.machine.detection import detect_device
from edge_devices.machine.system import System
from edge_devices.meters.base import MeterFacts, Trace
from recordings import FIXTURES, read_recording, recorded


def test_meters_made_from_what_a_person_says(log, tmp_path):
    write_log(tmp_path / "run.jsonl", log)
    assert virtual_meter(System(), f"replay:{tmp_path / 'run.jsonl'}").facts.name == "replay:simulated"
    assert virtual_meter(System(), "estimate:2.5,4").facts.is_estimate
    assert virtual_meter(System(), "rapl:package") is None
    assert virtual_meter(System(), None) is None
    for bad in ("estimate:2", "estimate:a,b", "estimate:-1,2"):
        with pytest.raises(MeterError, match="power model"):
            virtual_meter(System(), bad)
    with pytest.raises(DeviceError, match="cannot be read"):
        virtual_meter(System(), f"replay:{tmp_path / 'nothing'}")


def test_an_estimate_has_the_range_of_its_profiles_watts():
    meter = virtual_meter(recorded("raspberry-pi-5"), "estimate")
    assert "profile raspberry-pi-5" in meter.facts.source
    assert "2.65 W idle + 1.55 W" in meter.facts.source
    assert meter.facts.model_error == pytest.approx(1.5 / 3.1)  # the cores', the widest
    assert from_json(MeterFacts, meter.facts.to_json(), "meter") == meter.facts
    times = [0.1 * i for i in range(200)]
    energy = run_energy(Trace(facts=meter.facts, times=times, values=[4.2 * t for t in times]), [], 1.0, 19.0, 100)
    assert energy.joules_per_token.value == pytest.approx(4.2 * 18 / 100, rel=1e-3)
    assert energy.joules_per_token.low == pytest.approx(energy.joules_per_token.value * (1 - 1.5 / 3.1), rel=0.01)
    assert energy.sentence().startswith("ESTIMATE, nothing was measured: ")
    assert "the range of the model's watts" in energy.sentence()


@pytest.fixture
def machine_with(tmp_path):
    """Returns a function to a recorded machine with another processor, whose files are real ones."""

    def made(processor: str, name: str = "rapl-amd") -> System:
        root = tmp_path / name
        cpuinfo = "".join(f"processor\t: {number}\nmodel name\t: {processor}\n\n" for number in range(4))
        for path, text in {**read_recording(FIXTURES / f"{name}.json").files, "proc/cpuinfo": cpuinfo}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        return System(root=root, platform="linux")

    return made


def test_a_profile_without_watts_gives_no_estimate(machine_with):
    with pytest.raises(MeterError, match="has no watts for a power model"):
        virtual_meter(machine_with("Apple M3"), "estimate")


@pytest.mark.parametrize(
    ("processor", "name"),
    [
        ("Intel(R) Core(TM) i7-1185G7", "x86-laptop"),
        ("Intel(R) Core(TM) Ultra 7 155H", "core-ultra"),
        ("AMD Ryzen AI 9 HX 370 w/ Radeon 890M", "ryzen-ai"),
    ],
)
def test_watts_of_laptops_hold_for_machines_with_a_battery(processor, name, machine_with):
    meter = virtual_meter(machine_with(processor, "battery-dell"), "estimate")
    assert f"7.5 W idle + 8.25 W per busy core (profile {name})" in meter.facts.source
    assert meter.facts.model_error == pytest.approx(12.5 / 16.5)
    with pytest.raises(MeterError, match="those of laptops, and this machine has no battery; write estimate:IDLE,CORE"):
        virtual_meter(machine_with(processor), "estimate")


def test_idle_watts_of_a_server_are_those_of_its_processors(machine_with):
    system = machine_with("AMD EPYC 9R14")
    processors = detect_device(system).machine.usable_processors
    assert f"{processors * 1.05:g} W idle + 2.75 W per busy core" in virtual_meter(system, "estimate").facts.source


def test_replay_repeats_a_recording(log):
    now = [100.0]
    meter = ReplayMeter(System(clock=lambda: now[0]), log.trace)
    assert meter.facts.name == "replay:simulated"
    now[0] = 100.0 + log.trace.times[50] - log.trace.times[0] + 1e-9
    assert meter.read().value == log.trace.values[50]
    now[0] = 1e9
    with pytest.raises(MeterError, match="recording ends"):
        meter.read()
    with pytest.raises(MeterError, match="no samples"):
        ReplayMeter(System(), Trace(facts=log.facts))


def test_a_replay_says_so_in_every_output(log):
    """Nothing of it was measured in the run beside which it stands."""
    now = [0.0]
    meter = ReplayMeter(System(clock=lambda: now[0]), log.trace)
    steady = Trace(facts=meter.facts, times=[0.1 * i for i in range(300)], values=[0.5 * i for i in range(300)])
    energy = run_energy(steady, [], 1.0, 29.0, 100)
    assert energy.kind == energy.to_json()["kind"] == "replayed"
    label, text = energy.row()
    assert (label, text.startswith("REPLAYED from a recording of another run: ")) == ("energy", True)
    assert "measured" not in text
    report = make_report(replace(log, facts=meter.facts, trace=replace(log.trace, facts=meter.facts)))
    assert head_lines(report)[0].startswith("REPLAYED from a recording of another run: meter replay:simulated")


def test_a_file_that_is_no_energy_log_is_named(tmp_path):
    """Such as a log of speeds, which begins with a header too."""
    speeds = tmp_path / "speeds.jsonl"
    for head in (
        '{"kind": "header", "schema": 1, "device": {}}',
        '{"kind": "header", "schema": 1, "meter": 5, "environment": {}}',
        '{"schema": 3}',
        "5",
    ):
        speeds.write_text(head + "\n")
        with pytest.raises(
            MeterError, match=r"speeds.jsonl holds no readings of a meter; give the file that edge-bench run --energy wrote"
        ):
            virtual_meter(System(), f"replay:{speeds}")
    with pytest.raises(MeterError, match=r"give a file, such as replay:RUN\.jsonl"):
        virtual_meter(System(), "replay:")


def test_estimates_say_so_in_every_output(log):
    meter = EstimateMeter(System(), idle_watts=5.0, core_watts=10.0)
    estimate = replace(log, facts=meter.facts, trace=Trace(facts=meter.facts, times=log.trace.times, values=log.trace.values))
    report = make_report(estimate)
    assert report.to_json()["estimate"] is True
    assert head_lines(report)[0].startswith("ESTIMATE, nothing was measured")
    first = report.variants[0].joules_per_output_token
    assert first.low < 0.05 * first.value  # watts that somebody typed have no known error
    watch = EnergyWatch(System(), meter)
    with watch:
        System().sleep(0.15)
    assert watch.energy(10).sentence().startswith("ESTIMATE")


def steps_trace(tmp_path, loads, offset: float) -> Trace:
    rows = ["time,W"]
    for i in range(4000):
        t = i * 0.02
        on = any(a <= t < b for a, b in loads)
        rows.append(f"{t - offset},{7 if on else 2 + (i % 7) * 0.1}")
    path = tmp_path / "meter.csv"
    path.write_text("\n".join(rows))
    return import_csv(path)


def test_clocks_align_by_load_steps(tmp_path):
    loads = [(10.0, 13.0), (17.0, 22.0), (24.0, 32.0)]
    assert clock_offset(steps_trace(tmp_path, loads, 123.4), loads, search=(0.0, 300.0)) == pytest.approx(123.4, abs=0.03)


def test_clocks_that_fit_twice_or_not_at_all_are_refused(tmp_path):
    even = [(10.0 + 6 * i, 13.0 + 6 * i) for i in range(8)]
    with pytest.raises(MeasurementError, match="two places"):
        clock_offset(steps_trace(tmp_path, even, 0.0), even[2:5], search=(-60.0, 60.0))
    with pytest.raises(MeasurementError, match="no load step is visible"):
        clock_offset(steps_trace(tmp_path, [], 0.0), even[:2], search=(-5.0, 5.0))
    with pytest.raises(MeasurementError, match="1 load steps"):
        clock_offset(steps_trace(tmp_path, even, 0.0), even[:1], search=(-5.0, 5.0))
