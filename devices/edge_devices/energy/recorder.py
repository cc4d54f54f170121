"""A meter read again and again while other work runs, and what is measured of the meter itself."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, pvariance

from edge_devices.errors import MeasurementError, MeterError
from edge_devices.machine.system import System
from edge_devices.meters.base import Kind, Meter, MeterFacts, Trace

MIN_CHANGES = 8
LAGS_OF_LEAD = 1.5
WINDOW_LAGS = 2
WINDOW_REFRESHES = 20  # chosen in simulations: the intervals hold from here on, and a slow gauge's session ends on the same day
HALF_SHARE, SETTLED_SHARE = 0.5, 0.9
# An exponential filter that took s seconds from half of a step to 90 % of it shows 99 % another TAIL * s seconds later.
TAIL = 1.5
FLAT_SHARE = 0.03  # a reading has settled if it changes by less than this share of a step from the third to the last quarter after it
# A step is visible above 4 standard deviations or resolutions of the readings and 2 % of their level: a few that are equal have no noise.
VISIBLE_NOISES, VISIBLE_SHARE = 4.0, 0.02


@dataclass(frozen=True, kw_only=True)
class Characteristics:
    """How a meter behaves, in seconds.

    `refresh_s`, `longest_gap_s`: median and longest time between updates; `lag_s`: until a load step shows (90 %, or what its slow tail
    takes); `read_s`: the cost of a read; `zero_rate`: the share of reads that returned no value.
    """

    refresh_s: float
    longest_gap_s: float
    lag_s: float
    zero_rate: float
    read_s: float

    @property
    def lead_in_s(self) -> float:
        """Seconds at the start of a window in which the meter still shows the time before it: 1.5 × the lag and one refresh."""
        return LAGS_OF_LEAD * self.lag_s + self.refresh_s

    @property
    def shortest_window_s(self) -> float:
        """Shortest window that gives a figure: 10 s, 20 refreshes, or 2 lags; after the lead-in."""
        return self.shortest_measured_s + self.lead_in_s

    @property
    def shortest_measured_s(self) -> float:
        """Shortest window whose lead-in came before it: a gauge that averages for long has few values of its own in a shorter one."""
        return max(10.0, WINDOW_REFRESHES * self.refresh_s, WINDOW_LAGS * self.lag_s)

    @property
    def shortest_idle_s(self) -> float:
        """Shortest idle window: 30 s, or 20 refreshes; after the lead-in."""
        return max(30.0, WINDOW_REFRESHES * self.refresh_s) + self.lead_in_s

    @staticmethod
    def expected(facts: MeterFacts) -> Characteristics:
        """Returns the characteristics that a meter's facts state, for use without measuring them."""
        return Characteristics(refresh_s=facts.refresh_s, longest_gap_s=3 * facts.refresh_s, lag_s=facts.lag_s, zero_rate=0.0, read_s=0.0)


def characterise(trace: Trace, steps: Sequence[float], *, reads: int, read_s: float) -> Characteristics:
    """Computes the characteristics from a trace polled as fast as the meter allows while a light load toggled at `steps` (seconds).

    `reads`: attempted reads (those without a value are not in the trace); `read_s`: seconds per read.
    Raises MeasurementError for fewer than 8 updates.
    """
    changes = change_times(trace)
    if len(changes) < MIN_CHANGES:
        seconds = trace.times[-1] - trace.times[0] if trace.times else 0.0
        raise MeasurementError(
            f"{trace.facts.name} showed {len(changes)} new values in {seconds:.3g} s, too few to measure with; use another meter"
        )
    gaps = [b - a for a, b in pairwise(changes)]
    lags = [lag for a, b, c in _triples(trace, steps) if (lag := _lag(trace, a, b, c)) is not None]
    return Characteristics(
        refresh_s=median(gaps),
        longest_gap_s=max(gaps),
        lag_s=max(lags, default=trace.facts.lag_s),
        zero_rate=1 - len(trace.times) / reads if reads else 0.0,
        read_s=read_s,
    )


def change_times(trace: Trace) -> list[float]:
    """Returns the times of readings that differ from the reading before."""
    return [trace.times[i] for i in range(1, len(trace.times)) if trace.values[i] != trace.values[i - 1]]


def unsettled_share(trace: Trace, steps: Sequence[float]) -> float | None:
    """Returns by what share of a load step the readings still rise from the third to the last quarter after it, on average.

    Below 0 where they fall back; None where no step is visible, or there are no readings.
    """
    shares = []
    for before, step, after in _triples(trace, steps):
        middle, late = (step + after) / 2, (step + 3 * after) / 4
        spans = ((before + 3 * step) / 4, step), (middle, late), (late, after)
        old, third, last = ([trace.values[i] for i in trace.span(start, end)] for start, end in spans)
        if old and third and last:
            height = _height(trace, old, last)
            if height:
                shares.append((fmean(last) - fmean(third)) / height)
    return fmean(shares) if shares else None


def _height(trace: Trace, old: Sequence[float], new: Sequence[float]) -> float:
    """Returns the height of a step from the readings before and after it; 0 where it is not visible."""
    height, noise = fmean(new) - fmean(old), math.sqrt((pvariance(old) + pvariance(new)) / 2)
    least = max(VISIBLE_NOISES * max(noise, trace.facts.resolution), VISIBLE_SHARE * abs(fmean(old)))
    return height if abs(height) > least else 0.0


def _triples(trace: Trace, steps: Sequence[float]) -> list[tuple[float, float, float]]:
    edges = [trace.times[0], *steps, trace.times[-1]]
    return list(zip(edges, edges[1:], edges[2:], strict=False))


def _lag(trace: Trace, before: float, step: float, after: float) -> float | None:
    """Seconds from a step until it shows; 0 for a counter. None where the step is lost in noise."""
    if trace.facts.kind is Kind.COUNTER:
        return 0.0
    old = [trace.values[i] for i in trace.span((before + step) / 2, step)]
    new = [trace.values[i] for i in trace.span((step + after) / 2, after)]
    if len(old) < 2 or len(new) < 2:
        return None
    height = _height(trace, old, new)
    if not height:
        return None
    level = fmean(old)
    shown = [(trace.times[i] - step, (trace.values[i] - level) / height) for i in trace.span(step, after)]
    half, most = (next((s for s, share in shown if share >= wanted), after - step) for wanted in (HALF_SHARE, SETTLED_SHARE))
    return max(most, (most + TAIL * (most - half)) / LAGS_OF_LEAD)


JITTER = 0.3  # share of the interval: without it, readings in step with draft and verify would always fall in the same phase
SLEPT = "the machine slept"  # begins the reason of a fault that no window may contain
SLEPT_S = 0.5  # less is the clocks' own
# A clock that counts the time asleep, and one that does not: Linux and Android, then macOS.
CLOCKS = (("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"), ("CLOCK_MONOTONIC", "CLOCK_UPTIME_RAW"))


def slept_seconds() -> float:
    """Returns for how many seconds the machine has slept since it started; 0 where no two clocks tell (Windows)."""
    for always, awake in CLOCKS:
        if hasattr(time, always) and hasattr(time, awake):
            return time.clock_gettime(getattr(time, always)) - time.clock_gettime(getattr(time, awake))
    return 0.0


class Recorder:
    """Collects a trace, from a thread of its own inside a with block, or by `poll` from the caller's thread.

    A counter is polled for its wrap and read at the marks, since a read has a cost; a sampler is read at its own rate. A sleep of the
    machine is a fault: its meter counted on, or stood, while the clock stood.
    """

    def __init__(
        self, system: System, meter: Meter, *, interval_s: float | None = None, slept: Callable[[], float] = slept_seconds
    ) -> None:
        self._system, self._meter, self._slept = system, meter, slept
        self._slept_s = slept()
        self.interval_s = interval_s or meter.facts.poll_s
        self.trace = Trace(facts=meter.facts)
        self.raw: list[str] = []
        self.reads = 0
        self.faults: list[tuple[float, str]] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._random = random.Random(1)

    def poll(self) -> None:
        """Reads once. A failed read is recorded as a fault and does not stop the work."""
        with self._lock:
            self._note_sleep()
            self.reads += 1
            try:
                sample = self._meter.read()
            except MeterError as error:
                self.faults.append((self._system.clock(), str(error)))
                return
            if sample is not None:
                self.trace.add(sample)
                self.raw.append(sample.raw)

    def mark(self) -> float:
        """Returns the time now; a counter is read at the same moment."""
        with self._lock:
            self._note_sleep()
        if self._meter.facts.kind is Kind.COUNTER:
            failed = len(self.faults)
            self.poll()
            if len(self.faults) == failed:
                return self.trace.times[-1]
        return self._system.clock()

    def ignore_sleep(self) -> None:
        """Says that nothing was measured until now: a sleep before is no fault."""
        self._slept_s = self._slept()

    def _note_sleep(self) -> None:
        before, self._slept_s = self._slept_s, self._slept()
        if self._slept_s - before > SLEPT_S:
            self.faults.append((self._system.clock(), f"{SLEPT} for {self._slept_s - before:.0f} s"))

    def snapshot(self, start_s: float) -> tuple[Trace, list[tuple[float, str]]]:
        """Returns the readings from the last one before a time on, and all faults."""
        with self._lock:
            first = self.trace.index_at(start_s) if self.trace.times and self.trace.times[0] <= start_s else 0
            return Trace(facts=self.trace.facts, times=self.trace.times[first:], values=self.trace.values[first:]), list(self.faults)

    def forget(self, before_s: float) -> None:
        """Drops the readings before a time except the last of them."""
        with self._lock:
            if self.trace.times and self.trace.times[0] <= before_s:
                first = self.trace.index_at(before_s)
                del self.trace.times[:first], self.trace.values[:first], self.raw[:first]
            self.faults = [fault for fault in self.faults if fault[0] >= before_s]

    def next_interval(self) -> float:
        """Returns the seconds until the next reading."""
        return self.interval_s * (1 + self._random.uniform(-JITTER, JITTER))

    def __enter__(self) -> Recorder:
        self.poll()
        self._thread = threading.Thread(target=self._read_on, name="energy-recorder", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread:
            self._thread.join()
        self.poll()

    def _read_on(self) -> None:
        while not self._ended.wait(self.next_interval()):
            self.poll()
