"""A device with phases whose power is known at every moment: prefill, draft and verify, heat, throttling, wander and drift.

Power depends on the phase, on temperature (leakage) and on the clock. A hot device lowers its clock: work takes longer and less power.
Scenarios are drawn from ranges that describe devices, not the statistics under test. The meters are those of simulated_meter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from edge_devices.energy.run_log import LoggedRun, RunLog
from simulated_meter import REST_S, Device, Scenario, characterised, draw, facts_of, recorded

PHASES = ("prefill", "draft", "verify")


@dataclass(frozen=True, kw_only=True)
class Phased:
    """One device, one meter, one block of interleaved repeats of requests and of a loop of each phase."""

    base: Scenario
    watts: dict[str, float]  # at ambient temperature and full clock
    loop_bias: dict[str, float]  # a phase's power in its loop / in a request: other contexts, other rows
    prefill_s: float
    request_tokens: int
    draft_share: float  # of the decode time
    gap_s: float  # between requests, at idle power
    leakage: float  # per °C
    heat: float  # °C per W in equilibrium
    heat_s: float  # time constant
    limit: float  # °C above ambient where the clock is lowered
    throttled_clock: float
    ambient: float  # °C over the block


def draw_phased(meter: str, seed: int) -> Phased:
    """Draws a scenario; the same seed gives the same one."""
    r = np.random.default_rng([seed, 77])
    base = draw(meter, seed)
    above = base.load_watts - base.idle_watts
    return Phased(
        base=base,
        watts={
            "prefill": base.idle_watts + above * float(r.uniform(0.9, 1.5)),
            "draft": base.idle_watts + above * float(r.uniform(0.3, 0.9)),
            "verify": base.load_watts,
        },
        loop_bias={phase: 1 + 0.01 * float(r.standard_normal()) for phase in PHASES},
        prefill_s=float(10 ** r.uniform(-1, 1)),
        request_tokens=int(r.integers(32, 200)),
        draft_share=float(r.uniform(0.05, 0.35)),
        gap_s=float(10 ** r.uniform(-3, -1)),
        leakage=float(r.uniform(0.0, 0.003)),
        heat=float(r.uniform(2.0, 8.0)),
        heat_s=float(r.uniform(40.0, 200.0)),
        limit=float(r.choice([1e9, r.uniform(15.0, 60.0)])),
        throttled_clock=float(r.uniform(0.85, 0.97)),
        ambient=float(r.uniform(-3.0, 3.0)),
    )


@dataclass(kw_only=True)
class Truth:
    """What the device took per token and per request while the runs lasted, without the scatter from run to run."""

    tokens: int = 0
    requests: int = 0
    joules: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def joules_per_token(self) -> float:
        """Draft and verify, per emitted token."""
        return (self.joules["draft"] + self.joules["verify"]) / self.tokens


class Timeline:
    """Lays out windows one after another; heat follows the power that is expected, so scatter changes no truth."""

    def __init__(self, scenario: Phased, idle_s: float, total_s: float) -> None:
        self.s, self.at, self.warm, self.total_s = scenario, 0.0, 0.0, total_s
        self.loads: list[tuple[float, float, float]] = []
        self.truth = Truth()
        self._random = np.random.default_rng([scenario.base.seed, 5])
        self.rest(REST_S)
        self.idles = [(self.at, self.at + idle_s)]
        self.rest(idle_s)

    def rest(self, seconds: float) -> None:
        """Idle."""
        self._advance(seconds, self.s.base.idle_watts)

    def _advance(self, seconds: float, watts: float) -> None:
        self.warm += (self.s.heat * watts - self.warm) * -math.expm1(-seconds / self.s.heat_s)
        self.at += seconds

    def work(self, phase: str, seconds: float, factor: float, *, counts: bool = False) -> float:
        """Runs a phase of `seconds` at full clock; returns the seconds that it took."""
        s, used = self.s, 0.0
        while seconds > 1e-9:
            clock = s.throttled_clock if self.warm > s.limit else 1.0
            part = min(seconds / clock, 2.0)
            warmth = 1 + s.leakage * (self.warm + s.ambient * self.at / self.total_s)
            expected = s.base.idle_watts + (s.watts[phase] - s.base.idle_watts) * clock**2.5 * warmth
            expected *= 1 + s.base.drift * (self.at / self.total_s - 0.5)
            if counts:
                self.truth.joules[phase] += expected * part
            self.loads.append((self.at, self.at + part, expected * factor))
            self._advance(part, expected)
            seconds -= part * clock
            used += part
        return used

    def run(self, window_s: float, repeat: int) -> LoggedRun:
        """Requests until the window is full."""
        s, start_s, phases = self.s, self.at, dict.fromkeys(PHASES, 0.0)
        factor, requests = 1 + s.base.scatter * self._random.standard_normal(), 0
        decode_s = s.request_tokens * s.base.seconds_per_token * (1 + s.base.speed_scatter * self._random.standard_normal())
        while self.at - start_s < window_s or not requests:
            phases["prefill"] += self.work("prefill", s.prefill_s, factor, counts=True)
            rounds = max(1, round(decode_s / 4))  # draft and verify alternate faster than any meter; here every 4 s or so
            for _ in range(rounds):
                phases["draft"] += self.work("draft", decode_s / rounds * s.draft_share, factor, counts=True)
                phases["verify"] += self.work("verify", decode_s / rounds * (1 - s.draft_share), factor, counts=True)
            self.rest(s.gap_s)
            requests += 1
        tokens = requests * s.request_tokens
        self.truth.tokens += tokens
        self.truth.requests += requests
        return LoggedRun(
            variant="drafted", repeat=repeat, start_s=start_s, end_s=self.at, emitted_tokens=tokens, requests=requests, phases=phases
        )

    def loop(self, phase: str, window_s: float, repeat: int) -> LoggedRun:
        """One phase alone."""
        start_s, factor = self.at, self.s.loop_bias[phase] * (1 + self.s.base.scatter * self._random.standard_normal())
        seconds = self.work(phase, window_s, factor)
        return LoggedRun(
            variant=f"calibrate:{phase}", repeat=repeat, start_s=start_s, end_s=self.at, emitted_tokens=0, phases={phase: seconds}
        )


def simulate_phased(scenario: Phased) -> tuple[RunLog, Truth]:
    """Runs the whole protocol on a simulated device; returns what was recorded, and the truth."""
    s = scenario.base
    r = np.random.default_rng([s.seed, 6])
    measured = characterised(s, r)
    window_s = measured.shortest_window_s * max(s.window_share, 1.2)
    total_s = s.repeats * 4 * (window_s + REST_S) + 2 * measured.shortest_idle_s
    line, runs = Timeline(scenario, measured.shortest_idle_s, total_s), []
    for repeat in range(s.repeats):
        names = ["", *PHASES]
        for name in names if repeat % 2 == 0 else reversed(names):
            runs.append(line.loop(name, window_s, repeat) if name else line.run(window_s, repeat))
            line.rest(REST_S)
    line.idles.append((line.at, line.at + measured.shortest_idle_s))
    line.rest(measured.shortest_idle_s + REST_S)

    device = Device(s, line.loads, line.at, 4)
    trace = recorded(s, device, [*line.idles, *((run.start_s, run.end_s) for run in runs)], r)
    return RunLog(facts=facts_of(s), characteristics=measured, trace=trace, idles=line.idles, runs=runs), line.truth
