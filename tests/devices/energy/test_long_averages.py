"""Gauges that show a new value often and average over long: measured right, with intervals that hold, or refused with the reason."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import deque
from statistics import fmean, median

import pytest

from edge_devices.energy.live import EnergyPool, run_energy
from edge_devices.energy.protocol import Plan, Work, characterise_meter, measure
from edge_devices.energy.recorder import Recorder
from edge_devices.energy.report import make_report
from edge_devices.errors import MeasurementError
from edge_devices.meters.base import Kind, MeterFacts, Sample, Scope
from simulated_session import IDLE_WATTS, SimulatedMachine

LOAD_WATTS, TOKENS = 9.0, 50
QUANTUM = 0.01  # watts
SESSIONS, HELD = 15, 12  # intervals of 95 % hold the truth in fewer sessions with a probability of 0.5 %


class Gauge(SimulatedMachine):
    """Shows every `every_s` what `smooth` makes of the mean power of each refresh, in steps of 10 mW, with 0.5 % of noise.

    `smooth` gets the newest mean and returns what is shown; the facts state `stated_lag_s`.
    """

    def __init__(self, smooth, *, every_s: float, stated_lag_s: float, seed: int = 0) -> None:
        super().__init__(Kind.SAMPLER, refresh_s=every_s)
        self.facts = MeterFacts(
            name="gauge",
            kind=Kind.SAMPLER,
            scope=Scope.DEVICE,
            source="simulated",
            refresh_s=every_s,
            resolution=QUANTUM,
            poll_s=every_s / 2,
            lag_s=stated_lag_s,
        )
        self._smooth, self._every_s, self._noise = smooth, every_s, random.Random(seed)
        self._times, self._shown = [0.0], [IDLE_WATTS]
        self._next_s, self._energy_then = every_s, 0.0

    def _advance(self, to: float) -> None:
        while self._next_s <= to:
            super()._advance(max(self._next_s, self.now))
            mean = (self.energy - self._energy_then) / self._every_s
            self._energy_then = self.energy
            shown = self._smooth(mean) * (1 + 0.005 * self._noise.gauss(0, 1))
            self._times.append(self._next_s)
            self._shown.append(round(shown / QUANTUM) * QUANTUM)
            self._next_s += self._every_s
        super()._advance(max(to, self.now))

    def read(self) -> Sample:
        return Sample(self.now, self._shown[bisect_right(self._times, self.now) - 1])


def boxcar(readings: int):
    """The mean of the last readings."""
    kept = deque([IDLE_WATTS] * readings, maxlen=readings)
    return lambda mean: (kept.append(mean), fmean(kept))[1]


def fading(share: float):
    """An exponential filter, whose tail a time to 90 % does not tell."""
    state = [IDLE_WATTS]

    def smooth(mean: float) -> float:
        state[0] += share * (mean - state[0])
        return state[0]

    return smooth


def twice(readings: int):
    """A mean of means: firmware and driver average both."""
    first, second = boxcar(readings), boxcar(readings)
    return lambda mean: second(first(mean))


def middle(readings: int):
    """The median of the last readings, which shows a step late and at once."""
    kept = deque([IDLE_WATTS] * readings, maxlen=readings)
    return lambda mean: (kept.append(mean), median(kept))[1]


GAUGES = {
    "laptop, 1 s, mean of 20 s": (lambda: boxcar(20), 1.0, 2.0),
    "phone, 2 s, mean of 30 s": (lambda: boxcar(15), 2.0, 7.0),
    "laptop, 1 s, exponential of 12 s": (lambda: fading(1 - math.exp(-1 / 12)), 1.0, 2.0),
    "laptop, half a second, mean of means of 10 s": (lambda: twice(20), 0.5, 2.0),
    "phone, 2 s, median of 26 s": (lambda: middle(13), 2.0, 7.0),
    "board, 200 ms, mean of 8 s": (lambda: boxcar(40), 0.2, 0.0),
}


def report_of(gauge: Gauge, seed: int):
    """Measures requests of 9 W and 2.5 s, whose power scatters by 1 % from run to run."""
    measured = characterise_meter(gauge.system, gauge, gauge.load)
    draw = random.Random(seed)
    gauge.recorder = Recorder(gauge.system, gauge)
    gauge.recorder.poll()
    run = {"at": -1e9, "watts": LOAD_WATTS}

    def work() -> Work:
        if gauge.now - run["at"] > 1.0:  # after a rest it is another run
            run["watts"] = LOAD_WATTS * (1 + 0.01 * draw.gauss(0, 1))
        gauge.watts = run["watts"]
        gauge.sleep(2.5)
        gauge.watts, run["at"] = IDLE_WATTS, gauge.now
        return Work(emitted_tokens=TOKENS)

    log = measure(gauge.system, gauge.recorder, {"plain": work}, measured, Plan(repeats=6, soak=False, warm_ups=0))
    return make_report(log)


@pytest.mark.parametrize("name", GAUGES)
def test_long_averages_are_measured_right(name):
    make, every_s, lag_s = GAUGES[name]
    truth, errors, net_errors, held, idles = LOAD_WATTS * 2.5 / TOKENS, [], [], [], []
    for seed in range(SESSIONS):
        report = report_of(Gauge(make(), every_s=every_s, stated_lag_s=lag_s, seed=seed), seed)
        (variant,) = report.variants
        figure = variant.joules_per_output_token
        errors.append(figure.value / truth - 1)
        net_errors.append(variant.net_joules_per_output_token.value / (truth * (1 - IDLE_WATTS / LOAD_WATTS)) - 1)
        held.append(figure.low <= truth <= figure.high)
        idles.append(report.idle.watts)
    print(f"{name}: {fmean(errors):+.2%}, above idle {fmean(net_errors):+.2%}, {fmean(held):.0%}, idle {fmean(idles):.3f} W")
    assert abs(fmean(errors)) < 0.004
    assert abs(fmean(net_errors)) < 0.006
    assert sum(held) >= HELD


def test_a_gauge_that_averages_over_minutes_is_refused():
    gauge = Gauge(boxcar(400), every_s=1.0, stated_lag_s=2.0)
    with pytest.raises(
        MeasurementError, match=r"gauge (still changes, by \d+% of the step, in the last quarter of|does not show) a load of \d+ s"
    ):
        characterise_meter(gauge.system, gauge, gauge.load)
    assert gauge.now < 1000


def test_a_gauge_that_shows_no_load_is_refused():
    gauge = Gauge(lambda _: 3.0, every_s=1.0, stated_lag_s=2.0)
    with pytest.raises(MeasurementError, match="gauge does not show a load of"):
        characterise_meter(gauge.system, gauge, gauge.load)


def test_a_gauge_that_settles_at_once_takes_no_longer_than_before():
    gauge = Gauge(boxcar(1), every_s=1.0, stated_lag_s=2.0)
    characterise_meter(gauge.system, gauge, gauge.load)
    assert gauge.now < 40


def watched(gauge: Gauge, seconds: float, seed: int, idle_s: float = 90.0):
    """What `edge-run` sees: idle, then one run of a constant power with nothing measured of the gauge."""
    gauge.recorder = Recorder(gauge.system, gauge)
    gauge.sleep(idle_s)
    start_s = gauge.now
    gauge.watts = LOAD_WATTS * (1 + 0.01 * random.Random(seed).gauss(0, 1))
    truth = gauge.watts * seconds / TOKENS
    gauge.sleep(seconds)
    end_s = gauge.now
    gauge.watts = IDLE_WATTS
    return run_energy(gauge.recorder.trace, [], start_s, end_s, TOKENS), truth, (start_s, end_s)


@pytest.mark.parametrize("name", GAUGES)
@pytest.mark.parametrize("seconds", [130.0, 300.0])
def test_a_watch_of_a_gauge_that_lags_more_than_stated_has_wider_intervals(name, seconds):
    make, every_s, lag_s = GAUGES[name]
    held = []
    for seed in range(SESSIONS):
        energy, truth, _ = watched(Gauge(make(), every_s=every_s, stated_lag_s=lag_s, seed=seed), seconds, seed)
        figure = energy.joules_per_token
        held.append(figure is None or figure.low <= truth <= figure.high)
    print(f"{name}, {seconds:.0f} s: {fmean(held):.0%}, last {figure}")
    assert sum(held) >= HELD


def test_a_gauge_that_is_slower_than_stated_is_held_to_its_own_rate():
    gauge = Gauge(boxcar(1), every_s=6.0, stated_lag_s=2.0)
    gauge.facts = MeterFacts(**{**vars(gauge.facts), "refresh_s": 1.0, "poll_s": 0.5})
    energy, *_ = watched(gauge, 200.0, 1)
    assert energy.reason.startswith("the run of 200 s is too short; this meter needs 31")
    energy, truth, _ = watched(gauge, 400.0, 1)
    assert energy.joules_per_token.value == pytest.approx(truth, rel=0.02)


def test_short_answers_of_a_gauge_that_lags_more_than_stated_have_no_figure():
    """Each answer ends before the gauge shows it; together they would give half of the truth."""
    pools = {}
    for readings in (1, 30):
        gauge, pool = Gauge(boxcar(readings), every_s=1.0, stated_lag_s=2.0), EnergyPool()
        for seed in range(12):
            _, _, span = watched(gauge, 20.0, seed, idle_s=60.0)
            pool.add(gauge.recorder.trace, [], *span, TOKENS)
        pools[readings] = pool.energy()
    assert pools[1].joules_per_token.value == pytest.approx(LOAD_WATTS * 20 / TOKENS, rel=0.02)
    assert "this gauge lags by more than 2 s: measure with edge-bench run --energy" in pools[30].reason
