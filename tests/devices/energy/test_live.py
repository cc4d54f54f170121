"""Joules of requests that share a machine: alone, together, too short, and with a meter that fails."""

from __future__ import annotations

import time

import pytest

from edge_devices.energy.live import EnergyWatch, SharedWatch
from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters.base import Kind, MeterFacts, Sample, Scope
from simulated_session import SimulatedMachine

FAST = 1000.0  # simulated seconds per second; the pauses between readings are real ones
WATTS = 5.0


class Steady:
    """A counter at a constant power."""

    facts = MeterFacts(name="steady", kind=Kind.COUNTER, scope=Scope.RAILS, source="test", refresh_s=0.05, resolution=1e-6, poll_s=0.001)
    fails = False
    reads = 0

    def __init__(self) -> None:
        self.system = System(clock=lambda: time.perf_counter() * FAST)

    def read(self) -> Sample:
        self.reads += 1
        if self.fails:
            raise MeterError("gone")
        now = self.system.clock()
        return Sample(now, WATTS * now)


@pytest.fixture
def meter():
    return Steady()


@pytest.fixture
def watch(meter):
    watch = SharedWatch(meter.system, meter)
    yield watch
    watch.close()


def test_a_request_alone_has_joules_per_token(watch):
    for _ in range(2):  # one after the other is not together
        share = watch.begin()
        time.sleep(0.05)
        energy = watch.end(share, 100)
        assert energy.shared_with == 0
        assert energy.joules.value == pytest.approx(WATTS * energy.seconds, rel=0.01)
        assert energy.joules_per_token.value == pytest.approx(energy.joules.value / 100)
        assert energy.seconds > 0.05 * FAST


def test_joules_of_requests_that_ran_together_are_not_split(watch):
    first = watch.begin()
    time.sleep(0.02)
    second = watch.begin()
    time.sleep(0.03)
    one, other = watch.end(second, 10), watch.end(first, 50)
    for energy in (one, other):
        assert energy.shared_with == 1
        assert energy.joules_per_token is None
        assert "not split" in energy.reason
        assert energy.joules.value == pytest.approx(WATTS * energy.seconds, rel=0.02)
    assert other.joules.value > one.joules.value


def test_a_request_too_short_for_the_meter_says_so(watch):
    assert "too short" in watch.end(watch.begin(), 5).reason


def test_a_meter_that_fails_spoils_only_what_it_saw(watch, meter):
    meter.fails = True
    share = watch.begin()
    time.sleep(0.02)
    assert "the meter failed: gone" in watch.end(share, 5).reason
    meter.fails = False
    time.sleep(0.01)
    share = watch.begin()
    time.sleep(0.05)
    assert watch.end(share, 5).joules_per_token is not None


def test_nothing_is_read_while_nothing_runs_and_old_readings_are_dropped(watch, meter):
    for _ in range(5):
        share = watch.begin()
        time.sleep(0.02)
        watch.end(share, 5)
    time.sleep(0.02)
    reads = meter.reads
    time.sleep(0.05)
    assert meter.reads <= reads + 1
    assert reads > 10
    assert len(watch._recorder.trace.times) <= 2


def test_a_watch_that_was_closed_reads_no_more(meter):
    watch = SharedWatch(meter.system, meter)
    watch.begin()
    watch.close()
    reads = meter.reads
    time.sleep(0.02)
    assert meter.reads == reads


def watched(machine: SimulatedMachine, seconds: float, tokens: int):
    watch = EnergyWatch(machine.system, machine)
    with watch:
        machine.watts = 10.0
        machine.sleep(seconds)
    return watch.energy(tokens)


def test_energy_of_one_run():
    found = watched(SimulatedMachine(), 4.0, 100)
    assert found.joules_per_token.value == pytest.approx(0.4, rel=1e-3)
    assert "J/token, scope package" in found.sentence()
    assert found.to_json()["joules"]["value"] == pytest.approx(40.0, rel=1e-3)


def test_energy_of_one_run_that_cannot_be_told():
    assert "too short" in watched(SimulatedMachine(refresh_s=1.0), 4.0, 100).sentence()
    assert "no token" in watched(SimulatedMachine(), 4.0, 0).sentence()
    machine = SimulatedMachine()
    watch = EnergyWatch(machine.system, None)
    with watch:
        pass
    assert watch.energy(5).sentence() == "no energy meter on this machine"
    assert watch.energy(5).to_json()["meter"] is None
