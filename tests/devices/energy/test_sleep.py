"""A machine that sleeps while it is measured: its meter counts on, or stands, while the clock of decoding stands."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from edge_devices.energy.live import EnergyWatch, SharedWatch
from edge_devices.energy.protocol import characterise_meter, measure
from edge_devices.energy.recorder import Recorder
from edge_devices.energy.report import make_report
from edge_devices.energy.run_log import RunLog
from edge_devices.energy.virtual_meters import with_external_meter
from edge_devices.errors import MeasurementError
from edge_devices.meters.base import Kind, Trace
from simulated_session import PLAN, SimulatedMachine


class Sleeper(SimulatedMachine):
    """Sleeps in the work of given numbers: for 40 minutes at 0.8 W of which its clock shows nothing."""

    def __init__(self, sleeps: set[int], kind: Kind = Kind.COUNTER, refresh_s: float = 0.001) -> None:
        super().__init__(kind, refresh_s=refresh_s)
        self.slept, self.works, self._sleeps = 0.0, 0, sleeps

    def work(self):
        self.works += 1
        if self.works in self._sleeps:
            self.slept += 2400.0
            self.energy += 0.8 * 2400.0
        return self.workload(12.0)()


def session(machine: Sleeper) -> RunLog:
    measured = characterise_meter(machine.system, machine, machine.load)
    machine.recorder = Recorder(machine.system, machine, slept=lambda: machine.slept)
    machine.recorder.poll()
    return measure(machine.system, machine.recorder, {"plain": machine.work}, measured, replace(PLAN, soak=False))


@pytest.mark.parametrize(("kind", "refresh_s"), [(Kind.COUNTER, 0.001), (Kind.SAMPLER, 0.1)])
def test_a_repeat_in_which_the_machine_slept_does_not_count(kind, refresh_s):
    """Its window would hold 1920 J of the night beside 140 J of work."""
    report = make_report(session(Sleeper({10}, kind, refresh_s)))
    (variant,) = report.variants
    assert variant.n == 4
    assert [text.partition(": ")[2] for text in variant.refused] == ["the machine slept for 2400 s"]
    assert variant.joules_per_output_token.value == pytest.approx(12.0 * 2 / 50, rel=2e-3)


def test_an_external_meter_whose_machine_slept_is_refused():
    log = session(Sleeper({10}))
    with pytest.raises(MeasurementError, match="slept for 2400 s while the external meter's clock went on"):
        with_external_meter(log, Trace(facts=log.facts, times=[0.0, 1.0], values=[1.0, 1.0]))


@pytest.fixture
def asleep(monkeypatch):
    """Seconds by which a clock that counts sleep is ahead of one that does not."""
    hours = [100.0]
    clock = {"CLOCK_BOOTTIME": 1001, "CLOCK_MONOTONIC": 1002, "clock_gettime": lambda clock: 5000.0 + (hours[0] if clock == 1001 else 0.0)}
    for name, value in clock.items():
        monkeypatch.setattr(time, name, value, raising=False)
    return hours


def test_a_watch_has_no_figure_of_a_run_in_which_the_machine_slept(asleep):
    machine = SimulatedMachine()
    for sleeps_s in (0.0, 600.0, 0.0):
        with EnergyWatch(machine.system, machine) as watch:
            machine.watts = 7.0
            machine.sleep(30.0)
            asleep[0] += sleeps_s
            machine.energy += sleeps_s * 0.5
            machine.sleep(30.0)
        energy = watch.energy(100)
        if sleeps_s:
            assert energy.reason == "the meter failed: the machine slept for 600 s"
        else:
            assert energy.joules_per_token.value == pytest.approx(4.2, rel=1e-2)


def test_a_server_that_slept_between_requests_measures_the_next_one(asleep):
    machine = SimulatedMachine()
    watch = SharedWatch(machine.system, machine)
    try:
        for _ in range(2):
            asleep[0] += 3600.0
            share = watch.begin()
            machine.sleep(30.0)
            assert "slept" not in watch.end(share, 10).reason
    finally:
        watch.close()
