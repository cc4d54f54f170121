"""Reads a meter repeatedly while other work runs, and measures the characteristics of the meter itself."""

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
WINDOW_REFRESHES = 20  # chosen in simulations: enough for valid intervals, and a session with a slow meter ends on the same day
HALF_SHARE, SETTLED_SHARE = 0.5, 0.9
TAIL = 1.5  # times the seconds from 50 % to 90 % of a step; after that, an exponential filter shows 99 % of it
FLAT_SHARE = 0.03  # share of a step by which settled readings may still change from the third to the last quarter after it
# A step is visible if it exceeds 4 standard deviations or resolutions of the readings, and 2 % of their level. The resolution is needed
# because a few equal readings have no deviation.
VISIBLE_NOISES, VISIBLE_SHARE = 4.0, 0.02


@dataclass(frozen=True, kw_only=True)
class Characteristics:
    """How a meter behaves, in seconds.

    `refresh_s` and `longest_gap_s` are the median and the longest time between updates. `lag_s` is the time until 90 % of a load step
    shows, or longer if the step has a slow tail. `read_s` is the cost of a read. `zero_rate` is the share of reads that returned no value.
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
        """Shortest window for a figure: the longest of 10 s, 20 refreshes and 2 lags, plus the lead-in."""
        return self.shortest_measured_s + self.lead_in_s

    @property
    def shortest_measured_s(self) -> float:
        """Shortest window if the lead-in comes before it. In a shorter one, a meter that averages over long has few independent values."""
        return max(10.0, WINDOW_REFRESHES * self.refresh_s, WINDOW_LAGS * self.lag_s)

    @property
    def shortest_idle_s(self) -> float:
        """Shortest idle window: the longer of 30 s and 20 refreshes, plus the lead-in."""
        return max(30.0, WINDOW_REFRESHES * self.refresh_s) + self.lead_in_s

    @staticmethod
    def expected(facts: MeterFacts) -> Characteristics:
        """Returns the characteristics that a meter's facts state, if they are not measured."""
        return Characteristics(refresh_s=facts.refresh_s, longest_gap_s=3 * facts.refresh_s, lag_s=facts.lag_s, zero_rate=0.0, read_s=0.0)


def characterise(trace: Trace, steps: Sequence[float], *, reads: int, read_s: float) -> Characteristics:
    """Computes a meter's characteristics from a trace.

    The meter was polled as fast as it allows while a light load was switched at the times `steps` (seconds). `reads` counts attempted
    reads, because reads without a value are not in the trace. `read_s` is the seconds per read. Raises MeasurementError for fewer than 8
    updates.
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
    """Returns the times of readings that differ from the previous one."""
    return [trace.times[i] for i in range(1, len(trace.times)) if trace.values[i] != trace.values[i - 1]]


def unsettled_share(trace: Trace, steps: Sequence[float]) -> float | None:
    """Returns the mean share of a load step by which readings still rise from the third to the last quarter after it.

    It is below 0 if they fall back. None if no step is visible, or if there are no readings.
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
    """Returns the height of a step from the readings before and after it; 0 if it is not visible."""
    height, noise = fmean(new) - fmean(old), math.sqrt((pvariance(old) + pvariance(new)) / 2)
    least = max(VISIBLE_NOISES * max(noise, trace.facts.resolution), VISIBLE_SHARE * abs(fmean(old)))
    return height if abs(height) > least else 0.0


def _triples(trace: Trace, steps: Sequence[float]) -> list[tuple[float, float, float]]:
    edges = [trace.times[0], *steps, trace.times[-1]]
    return list(zip(edges, edges[1:], edges[2:], strict=False))


def _lag(trace: Trace, before: float, step: float, after: float) -> float | None:
    """Returns the seconds from a step until it shows; 0 for a counter, None if the step is not visible."""
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


JITTER = 0.3  # share of the interval; without it, readings could synchronize with draft and verify and always hit the same phase
SLEPT = "the machine slept"  # the beginning of the reason of a fault that no window may contain
SLEPT_S = 0.5  # clocks that differ by less than this have only drifted apart
# Pairs of clocks, of which the first counts time asleep and the second does not: on Linux and Android, and on macOS.
CLOCKS = (("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"), ("CLOCK_MONOTONIC", "CLOCK_UPTIME_RAW"))


def slept_seconds() -> float:
    """Returns the seconds that the machine has slept since it started; 0 on systems without such clocks (Windows)."""
    for always, awake in CLOCKS:
        if hasattr(time, always) and hasattr(time, awake):
            return time.clock_gettime(getattr(time, always)) - time.clock_gettime(getattr(time, awake))
    return 0.0


class Recorder:
    """Collects a trace, in its own thread inside a with block, or with `poll` in the caller's thread.

    A counter is read at the marks, and in between only often enough to notice that it wraps, because reading has a cost. A sampler is read
    at its own rate. If the machine sleeps, that is recorded as a fault, because the clock stops then, and the meter may count on.
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
        """Returns the current time, and reads a counter at the same moment."""
        with self._lock:
            self._note_sleep()
        if self._meter.facts.kind is Kind.COUNTER:
            failed = len(self.faults)
            self.poll()
            if len(self.faults) == failed:
                return self.trace.times[-1]
        return self._system.clock()

    def ignore_sleep(self) -> None:
        """Call this before a measurement, so that earlier sleep of the machine is not a fault."""
        self._slept_s = self._slept()

    def _note_sleep(self) -> None:
        before, self._slept_s = self._slept_s, self._slept()
        if self._slept_s - before > SLEPT_S:
            self.faults.append((self._system.clock(), f"{SLEPT} for {self._slept_s - before:.0f} s"))

    def snapshot(self, start_s: float) -> tuple[Trace, list[tuple[float, str]]]:
        """Returns the readings from the last one at or before `start_s` on, and all faults."""
        with self._lock:
            first = self.trace.index_at(start_s) if self.trace.times and self.trace.times[0] <= start_s else 0
            return Trace(facts=self.trace.facts, times=self.trace.times[first:], values=self.trace.values[first:]), list(self.faults)

    def forget(self, before_s: float) -> None:
        """Drops the readings before `before_s` except the last of them, and the faults before it."""
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
