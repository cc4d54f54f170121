"""Estimates and replayed recordings: their figures, their names, their labels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_devices.energy.live import EnergyWatch
from edge_devices.energy.report import make_report
from edge_devices.energy.run_log import write_log
from edge_devices.energy.text import report_lines
from edge_devices.energy.virtual_meters import EstimateMeter, ReplayMeter, virtual_meter
from edge_devices.errors import DeviceError, MeterError
from edge_devices.machine.system import System
from edge_devices.meters.trace import Trace


def test_meters_made_from_what_a_person_says(log, tmp_path):
    write_log(tmp_path / "run.jsonl", log)
    assert virtual_meter(System(), f"replay:{tmp_path / 'run.jsonl'}").facts.name == "replay:simulated"
    assert virtual_meter(System(), "estimate:2.5,4").facts.is_estimate
    assert virtual_meter(System(), "rapl:package") is None
    assert virtual_meter(System(), None) is None
    for bad in ("estimate", "estimate:2", "estimate:a,b", "estimate:-1,2"):
        with pytest.raises(MeterError, match="power model"):
            virtual_meter(System(), bad)
    with pytest.raises(DeviceError, match="cannot be read"):
        virtual_meter(System(), f"replay:{tmp_path / 'nothing'}")


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


def test_estimates_say_so_in_every_output(log):
    meter = EstimateMeter(System(), idle_watts=5.0, core_watts=10.0)
    estimate = replace(log, facts=meter.facts, trace=Trace(facts=meter.facts, times=log.trace.times, values=log.trace.values))
    report = make_report(estimate)
    assert report.to_json()["estimate"] is True
    assert report_lines(report)[0].startswith("ESTIMATE, nothing was measured")
    watch = EnergyWatch(System(), meter)
    with watch:
        System().sleep(0.15)
    assert watch.energy(10).sentence().startswith("ESTIMATE")
