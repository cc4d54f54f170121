"""Reads a meter repeatedly while other work runs."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import TracebackType

from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters.base import Kind, Meter, Trace

JITTER = 0.3  # share of the interval; without it the readings could be in step with draft and verify and always fall in the same phase


SLEPT = "the machine slept"  # begins the reason of a fault that no window may contain
SLEPT_S = 0.5
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._ended.set()
        if self._thread:
            self._thread.join()
        self.poll()

    def _read_on(self) -> None:
        while not self._ended.wait(self.next_interval()):
            self.poll()
