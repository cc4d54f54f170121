"""Joules of requests that share a machine: alone, together, too short, and with a meter that fails."""

from __future__ import annotations

import time

import pytest

from edge_devices.energy.live import EnergyPool, EnergyWatch, SharedWatch, run_energy
from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters.base import Kind, MeterFacts, Sample, Scope, Trace
from polling import wait
from simulated_session import SimulatedMachine

FAST = 1000.0  # simulated seconds per second; the pauses between readings are real ones
WATTS = 5.0


class Steady:
    """A counter at a constant power."""

    facts = MeterFacts(name="steady", kind=Kind.COUNTER, scope=Scope.RAILS, source="test", refresh_s=0.05, resolution=1e-6, poll_s=0.001)
    fails = False
    reads = 0
    stands: float | None = None

    def __init__(self) -> None:
        self.system = System(clock=lambda: self.stands or time.perf_counter() * FAST)

    def read(self) -> Sample:
        self.reads += 1
        if self.fails:
            raise MeterError("gone")
        now = self.system.clock()
        return Sample(now, WATTS * now)


def read_often(meter: Steady, count: int = 30) -> None:
    """Lets the watch read the meter so many times."""
    until = meter.reads + count
    assert wait(lambda: meter.reads >= until)


@pytest.fixture
def meter():
    return Steady()


@pytest.fixture
def watch(meter):
    watch = SharedWatch(meter.system, meter)
    yield watch
    watch.close()


def test_a_request_alone_has_joules_per_token(watch, meter):
    for _ in range(2):  # one after the other is not together
        share = watch.begin()
        read_often(meter)
        energy = watch.end(share, 100)
        assert energy.shared_with == 0
        assert energy.joules.value == pytest.approx(WATTS * energy.seconds, rel=0.01)
        assert energy.joules_per_token.value == pytest.approx(energy.joules.value / 100)
        assert energy.seconds > 0.02 * FAST


def test_joules_of_requests_that_ran_together_are_not_split(watch, meter):
    first = watch.begin()
    read_often(meter)
    second = watch.begin()
    read_often(meter)
    item, other = watch.end(second, 10), watch.end(first, 50)
    for energy in (item, other):
        assert energy.shared_with == 1
        assert energy.joules_per_token is None
        assert "not split" in energy.reason
        assert energy.joules.value == pytest.approx(WATTS * energy.seconds, rel=0.02)
    assert other.joules.value > item.joules.value


def test_a_request_too_short_for_the_meter_says_so(watch, meter):
    meter.stands = meter.system.clock()
    assert "too short" in watch.end(watch.begin(), 5).reason


def test_a_meter_that_fails_spoils_only_what_it_saw(watch, meter):
    meter.fails = True
    share = watch.begin()
    read_often(meter)
    assert "the meter failed: gone" in watch.end(share, 5).reason
    meter.fails = False
    share = watch.begin()
    read_often(meter)
    assert watch.end(share, 5).joules_per_token is not None


def test_nothing_is_read_while_nothing_runs_and_old_readings_are_dropped(watch, meter):
    for _ in range(5):
        share = watch.begin()
        read_often(meter, 3)
        watch.end(share, 5)
    time.sleep(0.02)
    reads = meter.reads
    time.sleep(0.05)
    assert meter.reads <= reads + 1
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
    result = watched(SimulatedMachine(), 4.0, 100)
    assert result.joules_per_token.value == pytest.approx(0.4, rel=1e-3)
    assert "J/token, scope package" in result.sentence()
    assert result.to_json()["joules"]["value"] == pytest.approx(40.0, rel=1e-3)


def test_energy_of_one_run_that_cannot_be_told():
    assert "too short" in watched(SimulatedMachine(refresh_s=1.0), 4.0, 100).sentence()
    assert "no token" in watched(SimulatedMachine(), 4.0, 0).sentence()
    machine = SimulatedMachine()
    watch = EnergyWatch(machine.system, None)
    with watch:
        pass
    assert watch.energy(5).sentence() == "no energy meter on this machine"
    assert watch.energy(5).to_json()["meter"] is None


class Gauge:
    """A sampler that shows a new value every two seconds."""

    facts = MeterFacts(
        name="gauge", kind=Kind.SAMPLER, scope=Scope.DEVICE, source="test", refresh_s=2.0, resolution=0.01, poll_s=0.5, lag_s=1.0
    )


def answers(count: int, *, seconds: float, gap_s: float = 30.0, offset_w: float = 0.0):
    """Traces of answers at 5 W on average, each read from its start on."""
    for number in range(count):
        start = number * (seconds + gap_s)
        samples = [Sample(start + i / 2, WATTS + offset_w + 0.1 * ((i // 4 + number) % 3 - 1)) for i in range(int(2 * seconds) + 1)]
        yield Trace.of(Gauge.facts, samples), start, start + seconds


def test_short_answers_are_pooled_until_the_gauge_can_tell():
    pool, single = EnergyPool(), []
    for number, (trace, start, end) in enumerate(answers(14, seconds=12.0)):
        single.append(run_energy(trace, [], start, end, 30))
        pool.add(trace, [], start, end, 30)
        if number == 5:
            early = pool.energy()
    assert all("too short" in item.reason for item in single)
    assert early.kind == "none"
    assert "needs 100 s" in early.reason
    energy = pool.energy()
    assert energy.kind == "measured"
    assert energy.joules_per_token.low <= WATTS * 12 / 30 <= energy.joules_per_token.high
    assert energy.joules_per_token.value == pytest.approx(WATTS * 12 / 30, rel=0.02)
    assert "14 runs together" in energy.row()[1]


def test_answers_shorter_than_the_lag_stay_without_a_figure():
    pool = EnergyPool()
    for trace, start, end in answers(40, seconds=2.0):
        pool.add(trace, [], start, end, 30)
    assert pool.energy().kind == "none"
    assert "saw 0 s of 40 runs" in pool.energy().reason


def test_a_pool_without_a_meter_gives_the_reason():
    pool = EnergyPool()
    EnergyWatch(System(), None, "no energy meter here").add_to(pool, 5)
    assert pool.energy().row() == ("energy", "not measured: no energy meter here")


def test_a_server_sums_up_overlapping_requests_once(watch, meter):
    began = meter.system.clock()
    first, second = watch.begin(), watch.begin()
    time.sleep(0.05)
    requests = [watch.end(first, 10), watch.end(second, 30)]
    total, maximum = watch.total(), WATTS * (meter.system.clock() - began)
    # A busy machine may wait between the four calls.
    assert max(item.joules.value for item in requests) * 0.99 <= total.joules.value <= maximum * 1.01
    assert total.joules.value < sum(item.joules.value for item in requests)
    assert total.joules_per_token.value == pytest.approx(total.joules.value / 40)
