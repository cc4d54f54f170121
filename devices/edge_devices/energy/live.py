"""Energy of requests without the full protocol, for one request or many short ones together. edge-run shows it beside its speed."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from edge_devices.energy.intervals import Interval, combined, of_error, of_model
from edge_devices.energy.recorder import MIN_CHANGES, Characteristics, Recorder, change_times
from edge_devices.energy.report import figure_text, origin_label
from edge_devices.energy.windows import MIN_UPDATES, fresh_values, measure_window, rise_within, sampling_error
from edge_devices.errors import DeviceError, MeasurementError
from edge_devices.machine.system import System
from edge_devices.meters.base import Kind, Meter, MeterFacts, Trace, scope_words
from edge_devices.meters.search import NO_METER

MIN_REFRESHES = 50
FAST_S = 0.1
LONGEST_GAP_S = 30.0  # a longer gap is not taken as normal for the meter
MAX_RISE = 0.05  # of the mean power, from the first to the second half of pooled runs; if it rises by more, the sampler lags
# The error of pooled runs is computed from this number of a sampler's newest values. More would not make it smaller.
KEPT_VALUES = 10_000
# If requests overlap without a break, they are added to the pool in parts of this length, so that readings need not be kept.
LONGEST_SPAN_S = 600.0


@dataclass(frozen=True, kw_only=True)
class RunEnergy:
    """Gross energy of one run of `seconds`: joules and joules per emitted token, or the reason why there is no figure.

    `shared_with` is the number of other requests that ran at the same time. If there were any, the joules are those of all together, and
    there is no figure per token. `pooled` is the number of runs that the figure covers.
    """

    facts: MeterFacts | None
    joules: Interval | None = None
    joules_per_token: Interval | None = None
    seconds: float = 0.0
    reason: str = ""
    shared_with: int = 0
    pooled: int = 1

    @property
    def kind(self) -> Literal["measured", "replayed", "estimate", "none"]:
        """Whether the figure per token was measured, is from a replayed recording, or is an estimate; "none" if there is no figure."""
        if self.joules_per_token is None or self.facts is None:
            return "none"
        return "estimate" if self.facts.is_estimate else "replayed" if self.facts.is_replay else "measured"

    def row(self) -> tuple[str, str]:
        """Returns the label and the text of the row that every screen shows.

        The text is a measured, replayed or estimated figure, or the reason why there is none.
        """
        labelled = self.kind in ("estimate", "replayed")
        return "energy", self.sentence() if labelled else f"{'not ' * (self.kind == 'none')}measured: {self.sentence()}"

    @property
    def watts(self) -> float | None:
        """Mean power of the run; None if there is no figure."""
        return self.joules.value / self.seconds if self.joules and self.seconds > 0 else None

    def sentence(self) -> str:
        """Returns the figure, or the reason why there is none, as one line."""
        if self.facts is None:
            return self.reason or NO_METER
        if self.joules_per_token is None:
            return f"no energy figure from {self.facts.name}: {self.reason}"
        label = origin_label(self.facts)
        return f"{label}{self.figure()} J/token, scope {scope_words(self.facts.scope)}, idle power included ({self.facts.name})"

    def figure(self) -> str:
        """Returns joules per token with the interval and its basis; empty if there is no figure."""
        if self.joules_per_token is None:
            return ""
        basis = "the range of the model's watts" if self.kind == "estimate" else f"{self.pooled} runs together" * (self.pooled > 1)
        return figure_text(self.joules_per_token, basis=basis)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "meter": self.facts.to_json() if self.facts else None,
            "joules": self.joules.to_json() if self.joules else None,
            "joules_per_token": self.joules_per_token.to_json() if self.joules_per_token else None,
            "reason": self.reason or (None if self.facts else NO_METER),
        }


class EnergyWatch:
    """Reads a meter during a with block; call `energy(tokens)` afterwards. Without a meter, it does nothing."""

    def __init__(self, system: System, meter: Meter | None, reason: str = "") -> None:
        """`reason` says why there is no meter."""
        self._reason = reason
        self._recorder = Recorder(system, meter, interval_s=watch_interval(meter.facts)) if meter else None
        self._window = (0.0, 0.0)
        self._prompt_end_s = 0.0

    def __enter__(self) -> EnergyWatch:
        if self._recorder:
            self._recorder.__enter__()
            self._window = (self._recorder.mark(), 0.0)
        return self

    def __exit__(self, *error: object) -> None:
        if self._recorder:
            self._window = (self._window[0], self._recorder.mark())
            self._recorder.__exit__(*error)

    def end_prompt(self) -> None:
        """Call this inside the block when a request's prompt is computed and its answer begins."""
        if self._recorder:
            self._prompt_end_s = self._recorder.mark()

    def energy(self, tokens: int) -> RunEnergy:
        """Returns the energy of the block and per emitted token, or a reason if the run was too short for the meter."""
        if self._recorder is None:
            return RunEnergy(facts=None, reason=self._reason)
        return run_energy(self._recorder.trace, self._recorder.faults, *self._window, tokens)

    def add_to(self, pool: EnergyPool, tokens: int) -> None:
        """Adds the block to a pool."""
        self._add(pool, self._window, tokens)

    def add_prompt_to(self, pool: EnergyPool, tokens: int) -> None:
        """Adds the part of the block before `end_prompt`, in which `tokens` tokens of a prompt were computed, to a pool."""
        self._add(pool, (self._window[0], self._prompt_end_s), tokens)

    def _add(self, pool: EnergyPool, window: tuple[float, float], tokens: int) -> None:
        if self._recorder is None:
            pool.reason = self._reason
        else:
            pool.add(self._recorder.trace, self._recorder.faults, *window, tokens)


def watch_interval(facts: MeterFacts) -> float:
    """Returns the seconds between readings. A fast counter is cheap, so it is read often, and short runs have figures."""
    fast = facts.kind is Kind.COUNTER and facts.refresh_s <= FAST_S
    return min(facts.poll_s, FAST_S) if fast else facts.poll_s


def run_energy(trace: Trace, faults: Sequence[tuple[float, str]], start_s: float, end_s: float, tokens: int) -> RunEnergy:
    """Returns the energy of a window and per emitted token, or a reason why there is no figure."""
    facts, seconds = trace.facts, end_s - start_s
    try:
        joules = _joules(trace, faults, start_s, end_s)
    except DeviceError as error:
        return RunEnergy(facts=facts, reason=str(error))
    if tokens <= 0:
        return RunEnergy(facts=facts, joules=joules, seconds=seconds, reason="no token was emitted")
    return RunEnergy(facts=facts, joules=joules, joules_per_token=joules.over(tokens), seconds=seconds)


def _joules(trace: Trace, faults: Sequence[tuple[float, str]], start_s: float, end_s: float) -> Interval:
    facts, expected = trace.facts, watched(trace)
    need = MIN_REFRESHES * expected.refresh_s + expected.lead_in_s
    if end_s - start_s < need:
        raise MeasurementError(f"the run of {end_s - start_s:.3g} s is too short; this meter needs {need:.3g} s")
    if faults:
        raise MeasurementError(f"the meter failed: {faults[0][1]}")
    window = measure_window(trace, start_s, end_s, expected)
    if facts.kind is Kind.SAMPLER and window.updates < MIN_UPDATES:
        raise MeasurementError(f"the meter showed {window.updates} new values; {MIN_UPDATES} are needed")
    # The meter's lag was not measured. If readings still rise, they may be late, and then the mean is too low by up to half of the rise.
    error, freedom = combined([(window.error_watts, window.freedom), (max(0.0, rise_within(trace, window, expected) / 2), math.inf)])
    return of_model(of_error(window.joules, error * window.seconds, freedom, 1), facts.model_error)


def watched(trace: Trace) -> Characteristics:
    """Returns characteristics of a meter that was not characterised: those of its facts, or slower ones if its readings show that."""
    expected = Characteristics.expected(trace.facts)
    gaps = [b - a for a, b in pairwise(change_times(trace))]
    if trace.facts.kind is Kind.COUNTER or len(gaps) < MIN_CHANGES:
        return expected
    return replace(
        expected, refresh_s=max(expected.refresh_s, median(gaps)), longest_gap_s=max(expected.longest_gap_s, min(max(gaps), LONGEST_GAP_S))
    )


class EnergyPool:
    """Sums up runs, each of which may be too short for the meter, until it can measure them together.

    At the beginning of a run, a meter may still show the time before it. So only the inside of each run is used. A figure needs as many
    seconds of insides in total as a single run would need.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._facts: MeterFacts | None = None
        self._runs = self._counted = self._tokens = self._updates = 0
        self._joules = self._seconds = self._observed_s = self._variance = self._rise_joules = 0.0
        self._values: deque[float] = deque(maxlen=KEPT_VALUES)

    def add(self, trace: Trace, faults: Sequence[tuple[float, str]], start_s: float, end_s: float, tokens: int) -> None:
        """Adds a run with `tokens` emitted tokens, unless the meter showed nothing of it or failed."""
        self._facts = facts = trace.facts
        self._runs += 1
        expected = watched(trace)
        try:
            window = measure_window(trace, start_s, end_s, expected)
        except DeviceError:
            return
        if faults or tokens <= 0:
            return
        self._counted += 1
        self._tokens += tokens
        self._updates += window.updates
        self._joules += window.joules
        self._seconds += window.seconds
        self._observed_s += window.observed_s
        if facts.kind is Kind.COUNTER:
            self._variance += (window.error_watts * window.seconds) ** 2
        else:
            self._values.extend(fresh_values(trace, start_s + expected.lead_in_s, end_s))
            self._rise_joules += rise_within(trace, window, expected) * window.seconds

    def energy(self) -> RunEnergy:
        """Returns joules and joules per token of all runs together, or says how much is missing for a figure."""
        if self._facts is None:
            return RunEnergy(facts=None, reason=self.reason)
        facts, need = self._facts, MIN_REFRESHES * self._facts.refresh_s
        few = facts.kind is Kind.SAMPLER and self._updates < MIN_UPDATES
        if not self._counted or self._observed_s < need or few:
            observed = f"this meter saw {self._observed_s:.3g} s of {self._runs} runs and needs {need:.3g} s"
            return RunEnergy(facts=facts, reason=observed if self._observed_s < need else f"{observed}, with {MIN_UPDATES} new values")
        error, freedom = math.sqrt(self._variance), math.inf
        if facts.kind is Kind.SAMPLER:
            watts, freedom = sampling_error(list(self._values))
            error = watts * self._seconds
            if self._rise_joules > max(MAX_RISE * self._joules, 2 * error):
                share = self._rise_joules / self._joules
                late = f"the readings rise by {share:.0%} within the runs, so this gauge lags by more than {facts.lag_s:g} s"
                return RunEnergy(facts=facts, reason=f"{late}: measure with edge-bench run --energy, which finds its lag")
            error = math.hypot(error, max(0.0, self._rise_joules / 2))
        joules = of_model(of_error(self._joules, error, freedom, 1), facts.model_error)
        per_token = joules.over(self._tokens)
        return RunEnergy(facts=facts, joules=joules, joules_per_token=per_token, seconds=self._seconds, pooled=self._counted)


@dataclass(eq=False, kw_only=True)
class Share:
    """A running request: its start in seconds, and the number of others that have run at the same time."""

    start_s: float
    others: int


class SharedWatch:
    """Reads a meter in its own thread while at least one request runs.

    `begin` and `end` never wait for the meter, and any thread may call them. Without a meter, every request gets the `reason`.
    """

    def __init__(self, system: System, meter: Meter | None, reason: str = "") -> None:
        self._reason = reason
        self._pool = EnergyPool()
        self._busy_since_s = 0.0
        self._busy_tokens = 0
        self._system = system
        self._recorder = Recorder(system, meter, interval_s=watch_interval(meter.facts)) if meter else None
        self._open: list[Share] = []
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if self._recorder:
            self._thread = threading.Thread(target=self._read_on, args=(self._recorder,), name="energy of requests", daemon=True)
            self._thread.start()

    def begin(self) -> Share:
        with self._changed:
            for share in self._open:
                share.others += 1
            share = Share(start_s=self._system.clock(), others=len(self._open))
            if not self._open:
                self._busy_since_s, self._busy_tokens = share.start_s, 0
                if self._recorder:
                    self._recorder.ignore_sleep()
            self._open.append(share)
            self._changed.notify()
        return share

    def end(self, share: Share, tokens: int) -> RunEnergy:
        """Ends a request with `tokens` emitted tokens. Returns the machine's joules during it; also per token if it ran alone."""
        if self._recorder is None:
            return RunEnergy(facts=None, reason=self._reason)
        end_s = self._system.clock()
        with self._changed:
            self._open.remove(share)
            self._busy_tokens += tokens
            if not self._open or end_s - self._busy_since_s > LONGEST_SPAN_S:  # overlapping requests are pooled as one run
                trace, faults = self._recorder.snapshot(self._busy_since_s)
                since = [fault for fault in faults if fault[0] >= self._busy_since_s]
                self._pool.add(trace, since, self._busy_since_s, end_s, self._busy_tokens)
                self._busy_since_s, self._busy_tokens = end_s, 0
            oldest = min((other.start_s for other in self._open), default=end_s)
        trace, faults = self._recorder.snapshot(share.start_s)
        self._recorder.forget(min(oldest, self._busy_since_s))
        energy = run_energy(trace, [f for f in faults if f[0] >= share.start_s], share.start_s, end_s, tokens)
        if not share.others:
            return energy
        reason = energy.reason or "other requests ran meanwhile: the joules are the whole machine's, and are not split"
        return replace(energy, joules_per_token=None, shared_with=share.others, reason=reason)

    def total(self) -> RunEnergy:
        """Returns the machine's energy of all requests so far, also per emitted token."""
        with self._changed:
            return self._pool.energy() if self._recorder else RunEnergy(facts=None, reason=self._reason)

    def close(self) -> None:
        with self._changed:
            self._ended.set()
            self._changed.notify()
        if self._thread:
            self._thread.join()

    def _read_on(self, recorder: Recorder) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._ended.is_set())
            if self._ended.is_set():
                return
            recorder.poll()
            self._ended.wait(recorder.next_interval())
