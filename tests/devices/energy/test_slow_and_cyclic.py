"""What the protocol says of meters that are late or slow, and of work that changes its power: against a truth that is known."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from statistics import fmean

import pytest

from edge_bench.measure.energy import session_sentence
from edge_devices.energy.protocol import Plan, Work, characterise_meter, measure
from edge_devices.energy.recorder import Recorder
from edge_devices.energy.report import make_report
from edge_devices.energy.run_log import RunLog
from edge_devices.errors import MeasurementError, MeterError
from edge_devices.meters.base import Kind, Sample, Scope
from simulated_session import IDLE_WATTS, SimulatedMachine

IDLE_NOISE = 0.003


class LateMachine(SimulatedMachine):
    """Its meter shows, every `refresh_s`, the mean power of the time since, as it was `lag_s` ago. `lost`: whether a reading fails."""

    def __init__(self, *, refresh_s: float, lag_s: float = 0.0, stated_s: float = 0.0, seed: int = 1) -> None:
        super().__init__(Kind.SAMPLER, refresh_s=stated_s or refresh_s)
        self._every_s, self._lag_s, self._history = refresh_s, lag_s, [(0.0, 0.0)]
        self._random, self.lost_until = random.Random(seed), 0.0
        self.lost_share, self.lost_s, self.raises = 0.0, 3.0, False

    def _advance(self, to: float) -> None:
        super()._advance(to)
        self._history.append((self.now, self.energy))

    def _joules(self, time_s: float) -> float:
        """The energy until a time, from the history backwards."""
        later = self._history[-1]
        for earlier in reversed(self._history):
            if earlier[0] <= time_s:
                span = later[0] - earlier[0]
                return earlier[1] + (later[1] - earlier[1]) * ((time_s - earlier[0]) / span if span else 0.0)
            later = earlier
        return 0.0

    def read(self) -> Sample | None:
        if self.recorder and self.now >= self.lost_until and self._random.random() < self.lost_share:
            self.lost_until = self.now + self.lost_s
        if self.now < self.lost_until:
            if self.raises:
                raise MeterError("the command gave no answer")
            return None
        shown = (self.now - self._lag_s) // self._every_s * self._every_s
        watts = (self._joules(shown) - self._joules(shown - self._every_s)) / self._every_s
        return Sample(self.now, max(0.0, watts) * (1 + IDLE_NOISE * ((shown * 7919) % 1 - 0.5)))


def session(machine: LateMachine, requests: Mapping[str, float], repeats: int = 5, seed: int = 7) -> RunLog:
    """Measures one workload: a prefill of 12 W, then decoding at 5 W; `requests` are their seconds. Returns the log."""
    measured = characterise_meter(machine.system, machine, machine.load)
    machine.recorder = Recorder(machine.system, machine)
    machine.recorder.poll()
    jitter = random.Random(seed)

    def work() -> Work:
        used = dict[str, float]()
        for phase, watts in (("prefill", 12.0), ("plain", 5.0)):
            used[phase] = requests[phase] * (1 + 0.01 * jitter.gauss(0, 1))
            machine.watts = watts
            machine.sleep(used[phase])
        machine.watts = IDLE_WATTS
        return Work(emitted_tokens=50, prompt_tokens=100, phases=used)

    return measure(machine.system, machine.recorder, {"plain": work}, measured, Plan(repeats=repeats, rest_s=5.0, soak=False))


def joules_per_request(log: RunLog) -> float:
    figure = make_report(log).variants[0].joules_per_request
    assert figure is not None
    return figure.value


@pytest.mark.parametrize(("refresh_s", "lag_s"), [(0.15, 1.1), (1.0, 2.0), (0.15, 0.0)])
def test_the_prefill_at_the_start_of_a_window_is_not_lost(refresh_s: float, lag_s: float) -> None:
    """A lead-in of 1.8 s and two or three requests a window: cutting it lost a prefill each time, always in the same direction."""
    errors = []
    for seed in range(12):
        log = session(LateMachine(refresh_s=refresh_s, lag_s=lag_s), {"prefill": 1.5, "plain": 4.5}, seed=seed)
        errors.append(joules_per_request(log) / (12.0 * 1.5 + 5.0 * 4.5) - 1)
    print(f"{fmean(errors):+.2%}")
    assert abs(fmean(errors)) < 0.005  # 1.1 to 3.0 % before


@pytest.mark.parametrize(("every_s", "max_min"), [(5.0, 4), (15.0, 10)])
def test_a_laptop_battery_that_shows_a_value_every_5_or_15_seconds_is_characterised(every_s: float, max_min: float) -> None:
    machine = LateMachine(refresh_s=every_s, stated_s=1.0)
    measured = characterise_meter(machine.system, machine, machine.load)
    assert measured.refresh_s == pytest.approx(every_s, rel=0.2)
    assert every_s / 2 <= measured.lag_s <= 2.5 * every_s
    assert machine.now < 60 * max_min
    log = session(LateMachine(refresh_s=every_s, stated_s=1.0), {"prefill": 1.5, "plain": 4.5}, repeats=3)
    assert joules_per_request(log) == pytest.approx(12.0 * 1.5 + 5.0 * 4.5, rel=0.01)


def test_a_gauge_that_shows_nothing_new_is_refused_after_minutes() -> None:
    machine = LateMachine(refresh_s=1000.0, stated_s=1.0)
    with pytest.raises(MeasurementError, match=r"showed . new values in \d+ s, too few to measure with; use another meter"):
        characterise_meter(machine.system, machine, machine.load)
    assert 120 < machine.now < 1000


@pytest.mark.parametrize("raises", [False, True])
def test_readings_that_are_lost_for_3_seconds_cost_no_figure(raises: bool) -> None:
    """2 % of the polls begin such a time: every session has a figure, whose interval is wider for what was not read."""
    held, errors = [], []
    for seed in range(12):
        machine = LateMachine(refresh_s=0.15, lag_s=0.2, seed=seed)
        machine.lost_share, machine.raises = 0.02, raises
        report = make_report(session(machine, {"prefill": 1.5, "plain": 4.5}, repeats=10)).variants[0]
        assert report.n >= 2, report.refused
        figure = report.joules_per_request
        assert figure is not None
        held.append(figure.low <= 40.5 <= figure.high)
        errors.append(figure.value / 40.5 - 1)
    assert sum(held) >= 10
    assert abs(fmean(errors)) < 0.02


def test_a_battery_whose_reading_fails_may_have_had_its_charger_in() -> None:
    machine = LateMachine(refresh_s=0.15)
    machine.facts = machine.facts.__class__(**{**vars(machine.facts), "scope": Scope.DEVICE})
    log = session(machine, {"prefill": 1.5, "plain": 4.5})
    log.faults.append((log.runs[0].start_s + 1.0, "AC supplies power"))
    assert make_report(log).variants[0].refused == ["repeat 0: the meter failed: AC supplies power"]


def test_the_length_of_a_session_is_told_with_the_shortest() -> None:
    machine = LateMachine(refresh_s=2.0)
    measured = characterise_meter(machine.system, machine, machine.load)
    works = {name: machine.workload(5.0) for name in ("plain", "dense 2", "calibrate:plain", "calibrate:draft")}
    text = session_sentence(Plan(repeats=5), works, measured)
    assert text.startswith("energy takes about ")
    assert re.search(r"5 repeats of 4 windows; the meter shows a new value every 2 s; 3 repeats take (\d+) min: --minutes \1$", text)
    text = session_sentence(Plan(repeats=3, soak=True), {"plain": works["plain"]}, measured)
    assert text.endswith("; intervals of 3 repeats are 1.7 times as wide as those of 5")
