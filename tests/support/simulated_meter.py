"""Meters with a known truth: a device whose power is known at every moment, seen through a meter with the faults of real ones.

Scenarios are drawn from ranges that describe devices and meters, not the statistics under test. All in simulated time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from edge_devices.energy.recorder import Characteristics, characterise
from edge_devices.energy.run_log import LoggedRun, RunLog
from edge_devices.meters.android import AMPERES, current_unit
from edge_devices.meters.base import Kind, MeterFacts, Scope, Trace, Unwrapped

COUNTER, SAMPLER, GAUGE = "counter", "fast sampler", "2-second gauge"
# Gauges that update and lag by so many times as much.
SLOWER = {GAUGE: 1.0, "1-second battery": 0.5, "5-second battery": 2.5, "15-second battery": 7.5}
REST_S = 5.0
GRID_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One device, one meter, one block of repeats."""

    seed: int
    meter: str
    # the device
    idle_watts: float
    load_watts: float
    drift: float  # change of the load's power over the block, as a share
    scatter: float  # of the power from run to run
    speed_scatter: float
    wander: float  # of the power within a run, with time constant wander_s
    wander_s: float
    contrast: float  # draft and verify alternate at load × (1 ± contrast)
    cycle_s: float
    seconds_per_token: float
    repeats: int
    window_share: float  # window length / shortest allowed one
    # the meter
    refresh_s: float = 0.0
    refresh_jitter: float = 0.0
    delay_s: float = 0.0
    smoothing_s: float = 0.0
    averages: bool = False  # mean since the last refresh, or the moment
    quantum: float = 0.0  # joules or watts; of a gauge amperes
    noise: float = 0.0
    zero_rate: float = 0.0
    unit_amperes: float = 1.0
    sign: int = 1
    span: int | None = None  # of a counter's register
    span_left: float = 0.5  # joules until the first wrap, as a share of the session's energy


def draw(meter: str, seed: int) -> Scenario:
    """Draws a scenario; the same seed gives the same one."""
    r = np.random.default_rng(seed)
    idle = float(r.uniform(0.4, 3.0))
    scenario = Scenario(
        seed=seed,
        meter=meter,
        idle_watts=idle,
        load_watts=idle + float(r.uniform(1.5, 11.0)),
        drift=float(r.uniform(-0.05, 0.05)),
        scatter=float(r.uniform(0.002, 0.03)),
        speed_scatter=float(r.uniform(0.0, 0.01)),
        wander=float(r.uniform(0.0, 0.02)),
        wander_s=float(r.uniform(0.2, 3.0)),
        contrast=float(r.uniform(0.0, 0.25)),
        cycle_s=float(r.uniform(0.02, 0.3)),
        seconds_per_token=float(r.uniform(0.02, 0.3)),
        repeats=int(r.integers(5, 13)),
        window_share=float(r.uniform(0.85, 1.6)),
    )
    if meter == COUNTER:
        return replace(
            scenario,
            refresh_s=float(10 ** r.uniform(-3, -0.5)),
            refresh_jitter=float(r.uniform(0, 0.1)),
            quantum=float(10 ** r.uniform(-6, -3)),
            span=int(10 ** r.uniform(8, 11)),
            span_left=float(r.uniform(0, 1.5)),
        )
    if meter == SAMPLER:
        return replace(
            scenario,
            refresh_s=float(r.uniform(0.01, 0.2)),
            refresh_jitter=float(r.uniform(0, 0.2)),
            delay_s=float(r.uniform(0, 0.1)),
            averages=bool(r.integers(2)),
            quantum=float(10 ** r.uniform(-3, -2)),
            noise=float(r.uniform(0.002, 0.05)),
        )
    slower = SLOWER[meter]
    return replace(
        scenario,
        refresh_s=slower * float(r.uniform(1.6, 2.4)),
        refresh_jitter=float(r.uniform(0.05, 0.35)),
        delay_s=slower * float(r.uniform(0, 3.0)),
        smoothing_s=slower * float(r.choice([0.0, r.uniform(0.2, 1.5)])),
        averages=bool(r.integers(2)),
        quantum=float(10 ** r.uniform(-3.3, -2)),
        noise=float(r.uniform(0.002, 0.03)),
        zero_rate=float(r.uniform(0, 0.1)),
        unit_amperes=float(r.choice([1e-3, 1e-6])),
        sign=int(r.choice([-1, 1])),
    )


class Device:
    """True power over one session: spans of load with idle power around them."""

    def __init__(self, scenario: Scenario, loads: list[tuple[float, float, float]], end_s: float, stream: int) -> None:
        """`loads`: start, end, watts."""
        self.end_s = end_s
        self._s = scenario
        self._fill(np.random.default_rng([scenario.seed, stream]), loads)

    def _fill(self, r: np.random.Generator, loads: list[tuple[float, float, float]]) -> None:
        """Cumulative energy at every edge of a run and every grid point; power is constant in between, up to the alternation."""
        s = self._s
        edges = np.array([t for a, b, _ in loads for t in (a, b)])
        self.times = np.union1d(np.arange(-20.0, self.end_s + 20.0, GRID_S * max(1.0, s.wander_s)), edges)
        kernel = np.exp(
            -np.arange(0, 5 * max(1, round(s.wander_s / (GRID_S * max(1.0, s.wander_s))))) * GRID_S * max(1.0, s.wander_s) / s.wander_s
        )
        white = r.standard_normal(len(self.times) + len(kernel) - 1)
        wander = s.wander * np.convolve(white, kernel / math.sqrt(float(np.sum(kernel**2))), mode="valid")
        self.watts = np.full(len(self.times), s.idle_watts)
        self.loaded = np.zeros(len(self.times))
        for a, b, watts in loads:
            inside = slice(int(np.searchsorted(self.times, a)), int(np.searchsorted(self.times, b)))
            self.watts[inside] = watts
            self.loaded[inside] = watts
        self.watts = self.watts * (1 + np.where(self.loaded > 0, wander, wander / 4))
        self.curve = np.concatenate([[0.0], np.cumsum(self.watts[:-1] * np.diff(self.times))])

    def joules(self, t: np.ndarray) -> np.ndarray:
        """Energy since the start without the alternation, which cancels over a cycle; cycles are short against refreshes that average."""
        return np.interp(t, self.times, self.curve)

    def power(self, t: np.ndarray) -> np.ndarray:
        """Power at a moment, draft and verify told apart."""
        at = np.searchsorted(self.times, t, side="right") - 1
        up = np.where((t / self._s.cycle_s) % 1 < 0.5, 1.0, -1.0)
        return self.watts[at] + self.loaded[at] * self._s.contrast * up


def refresh_times(scenario: Scenario, device: Device, r: np.random.Generator) -> np.ndarray:
    """When the meter's value is new: jittered, and a gauge is sometimes late by several refreshes (7 s at most)."""
    count = int((device.end_s + 30) / scenario.refresh_s * 1.2) + 10
    gaps = scenario.refresh_s * np.exp(scenario.refresh_jitter * r.standard_normal(count))
    if scenario.meter == GAUGE:
        gaps = np.minimum(np.where(r.random(count) < 0.03, gaps * r.uniform(1.5, 3.5, count), gaps), 7.0)
    times = -15.0 + np.cumsum(gaps)
    return times[times < device.end_s + 5]


def shown_watts(scenario: Scenario, device: Device, times: np.ndarray, r: np.random.Generator) -> np.ndarray:
    """What a sampler shows from each refresh on."""
    observed = times - scenario.delay_s
    if scenario.averages or scenario.smoothing_s:
        edges = np.concatenate([[observed[0] - scenario.refresh_s], observed])
        shown = np.diff(device.joules(edges)) / np.diff(edges)
        if scenario.smoothing_s:
            shares = 1 - np.exp(-np.diff(edges) / scenario.smoothing_s)
            level, smooth = float(shown[0]), []
            for mean, share in zip(shown.tolist(), shares.tolist(), strict=True):
                level += share * (mean - level)
                smooth.append(level)
            shown = np.array(smooth)
    else:
        shown = device.power(observed)
    return shown * (1 + scenario.noise * r.standard_normal(len(times)))


def poll_times(start_s: float, end_s: float, interval_s: float, r: np.random.Generator) -> np.ndarray:
    """When a recorder reads: its interval ± 30 %."""
    times = start_s + np.cumsum(interval_s * r.uniform(0.7, 1.3, int((end_s - start_s) / interval_s * 1.5) + 4))
    return times[times < end_s]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Idle, runs with rests, idle: the spans, and what the device truly took per token while the runs lasted."""

    idles: list[tuple[float, float]]
    runs: list[tuple[float, float]]
    watts: list[float]
    tokens: int
    joules_per_token: float
    net_joules_per_token: float
    run_joules: list[float] = field(default_factory=list)  # what each run truly took, wandering and scatter included


def plan_block(scenario: Scenario, window_s: float, idle_s: float) -> Block:
    """Draws the runs of one block. Drift is part of the truth, scatter from run to run is not."""
    s, r = scenario, np.random.default_rng([scenario.seed, 1])
    tokens = max(1, math.ceil(window_s / s.seconds_per_token))
    total = s.repeats * (tokens * s.seconds_per_token + REST_S)
    at, runs, drifted = REST_S + idle_s, [], []
    begin = at
    for _ in range(s.repeats):
        seconds = tokens * s.seconds_per_token * (1 + s.speed_scatter * r.standard_normal())
        drifted.append(s.load_watts * (1 + s.drift * ((at + seconds / 2 - begin) / total - 0.5)))
        runs.append((at, at + seconds))
        at += seconds + REST_S
    mean = float(np.mean(drifted))
    return Block(
        idles=[(REST_S, REST_S + idle_s), (at, at + idle_s)],
        runs=runs,
        watts=[w * (1 + s.scatter * r.standard_normal()) for w in drifted],
        tokens=tokens,
        joules_per_token=mean * s.seconds_per_token,
        net_joules_per_token=(mean - s.idle_watts) * s.seconds_per_token,
    )


def facts_of(s: Scenario) -> MeterFacts:
    """What would be known of this meter before it is characterised."""
    slower = SLOWER.get(s.meter, 0.0)
    return MeterFacts(
        name=s.meter,
        kind=Kind.COUNTER if s.meter == COUNTER else Kind.SAMPLER,
        scope=Scope.EXTERNAL,
        source="simulated",
        refresh_s=2.0 * slower if slower else s.refresh_s,
        lag_s=7.0 * slower if slower else 0.2 if s.meter == SAMPLER else 0.0,
        resolution=s.quantum * (4.0 if slower else 1.0),
        poll_s=0.6 * slower if slower else 1.0 if s.meter == COUNTER else max(0.15, s.refresh_s),
    )


def characterised(s: Scenario, r: np.random.Generator) -> Characteristics:
    """What a load that is switched on and off five times tells of the meter."""
    facts = facts_of(s)
    half_s = max(20 * s.refresh_s if s.meter == COUNTER else 3.0, 5 * facts.refresh_s, 2 * facts.lag_s)
    toggled = Device(s, [(half_s * i, half_s * (i + 1), s.load_watts) for i in (1, 3, 5)], 6 * half_s, 3)
    polls = poll_times(0.0, 6 * half_s, facts.refresh_s / 8, r)
    return characterise(READ[s.meter](s, toggled, polls, r), [half_s * i for i in range(1, 6)], reads=len(polls), read_s=0.0)


def recorded(s: Scenario, device: Device, spans: list[tuple[float, float]], r: np.random.Generator) -> Trace:
    """What a recorder reads that also reads at every mark."""
    marks = np.array(spans).ravel()
    polls = np.sort(np.concatenate([poll_times(0.0, device.end_s, facts_of(s).poll_s, r), marks]))
    return READ[s.meter](s, device, polls, r)


def simulate(scenario: Scenario) -> tuple[RunLog, Block]:
    """Runs the whole protocol on a simulated device; returns what was recorded, and the truth."""
    s, r = scenario, np.random.default_rng([scenario.seed, 2])
    measured = characterised(s, r)
    block = plan_block(s, measured.shortest_window_s * s.window_share, measured.shortest_idle_s)
    end_s = block.idles[1][1] + REST_S
    device = Device(s, [(a, b, w) for (a, b), w in zip(block.runs, block.watts, strict=True)], end_s, 4)
    runs = [LoggedRun(variant="decode", repeat=i, start_s=a, end_s=b, emitted_tokens=block.tokens) for i, (a, b) in enumerate(block.runs)]
    trace = recorded(s, device, [*block.idles, *block.runs], r)
    block.run_joules.extend(float(np.diff(device.joules(np.array(span)))[0]) for span in block.runs)
    return RunLog(facts=facts_of(s), characteristics=measured, trace=trace, idles=block.idles, runs=runs), block


def read_counter(s: Scenario, device: Device, polls: np.ndarray, r: np.random.Generator) -> Trace:
    """A register in whole quanta that wraps, undone by the meters' own code."""
    times = refresh_times(s, device, r)
    at = np.searchsorted(times, polls, side="right") - 1
    quanta = np.floor((device.joules(times[at]) + 5.0) / s.quantum).astype(np.int64)
    session = int(quanta[-1] - quanta[0]) + 2
    span = max(s.span or 0, session)
    start = span - int(session * s.span_left)
    register = Unwrapped("simulated", span - 1)
    # The meters add the highest register value per turn, as powercap's range does, so the sequence repeats every span - 1.
    values = [register.total(q) * s.quantum for q in ((start + quanta) % (span - 1)).tolist()]
    return Trace(facts=facts_of(s), times=polls.tolist(), values=values)


def read_sampler(s: Scenario, device: Device, polls: np.ndarray, r: np.random.Generator) -> Trace:
    """Watts in whole quanta."""
    times = refresh_times(s, device, r)
    shown = np.round(shown_watts(s, device, times, r) / s.quantum) * s.quantum
    at = np.searchsorted(times, polls, side="right") - 1
    return Trace(facts=facts_of(s), times=polls.tolist(), values=shown[at].tolist())


def read_gauge(s: Scenario, device: Device, polls: np.ndarray, r: np.random.Generator) -> Trace:
    """A phone's gauge in its own unit and sign, with false zeros; the unit is found by the meters' own code."""
    volts = 3.85
    times = refresh_times(s, device, r)
    amperes = np.round(shown_watts(s, device, times, r) / volts / s.quantum) * s.quantum
    at = np.searchsorted(times, polls, side="right") - 1
    raw = np.round(s.sign * amperes[at] / s.unit_amperes).astype(np.int64)
    raw[r.random(len(raw)) < s.zero_rate] = 0
    unit = current_unit(int(s.sign * s.idle_watts / volts / s.unit_amperes), volts)
    output = raw != 0
    return Trace(facts=facts_of(s), times=polls[output].tolist(), values=(np.abs(raw[output]) * AMPERES[unit] * volts).tolist())


READ = {COUNTER: read_counter, SAMPLER: read_sampler, **dict.fromkeys(SLOWER, read_gauge)}
