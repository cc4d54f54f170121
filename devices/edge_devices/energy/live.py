"""Energy of single requests, without the full protocol: what edge-run shows beside its speed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from edge_devices.energy.characteristics import Characteristics
from edge_devices.energy.intervals import Interval, of_error, of_model
from edge_devices.energy.recorder import Recorder
from edge_devices.energy.text import figure_text
from edge_devices.energy.windows import MIN_UPDATES, measure_window
from edge_devices.errors import DeviceError, MeasurementError
from edge_devices.machine.system import System
from edge_devices.meters.base import Kind, Meter, MeterFacts
from edge_devices.meters.search import NO_METER
from edge_devices.meters.trace import Trace

MIN_REFRESHES = 50
FAST_S = 0.1


@dataclass(frozen=True, kw_only=True)
class RunEnergy:
    """Gross energy of one run of `seconds`: joules and joules per emitted token, or why there is no figure.

    `shared_with`: number of other requests that ran meanwhile; the joules are then of all together, and none are given per token.
    """

    facts: MeterFacts | None
    joules: Interval | None = None
    joules_per_token: Interval | None = None
    seconds: float = 0.0
    reason: str = ""
    shared_with: int = 0

    @property
    def watts(self) -> float | None:
        """Mean power of the run; None where there is no figure."""
        return self.joules.value / self.seconds if self.joules and self.seconds > 0 else None

    def sentence(self) -> str:
        """Returns the one line to show."""
        if self.facts is None:
            return self.reason or NO_METER
        label = "ESTIMATE, nothing was measured: " if self.facts.is_estimate else ""
        if self.joules_per_token is None:
            return f"{label}no energy figure from {self.facts.name}: {self.reason}"
        basis = "the range of the model's watts" if self.facts.is_estimate else ""
        figure = figure_text(self.joules_per_token, basis=basis)
        return f"{label}{figure} J/token, scope {self.facts.scope}, idle power included ({self.facts.name})"

    def to_json(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        return {
            "meter": self.facts.to_json() if self.facts else None,
            "joules": self.joules.to_json() if self.joules else None,
            "joules_per_token": self.joules_per_token.to_json() if self.joules_per_token else None,
            "reason": self.reason or (None if self.facts else NO_METER),
        }


class EnergyWatch:
    """Reads a meter while a with block runs; then call `energy(tokens)`. Without a meter it does nothing."""

    def __init__(self, system: System, meter: Meter | None, reason: str = "") -> None:
        """`reason`: why there is no meter."""
        self._reason = reason
        self._recorder = Recorder(system, meter, interval_s=watch_interval(meter.facts)) if meter else None
        self._window = (0.0, 0.0)

    def __enter__(self) -> EnergyWatch:
        if self._recorder:
            self._recorder.__enter__()
            self._window = (self._recorder.mark(), 0.0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._recorder:
            self._window = (self._window[0], self._recorder.mark())
            self._recorder.__exit__(kind, error, traceback)

    def energy(self, tokens: int) -> RunEnergy:
        """Returns the energy of the block, and that per emitted token; a reason instead where the run was too short for the meter."""
        if self._recorder is None:
            return RunEnergy(facts=None, reason=self._reason)
        return run_energy(self._recorder.trace, self._recorder.faults, *self._window, tokens)


def watch_interval(facts: MeterFacts) -> float:
    """Returns the seconds between readings of a run; a fast counter is cheap and is read often, so that short runs have figures."""
    fast = facts.kind is Kind.COUNTER and facts.refresh_s <= FAST_S
    return min(facts.poll_s, FAST_S) if fast else facts.poll_s


def run_energy(trace: Trace, faults: Sequence[tuple[float, str]], start_s: float, end_s: float, tokens: int) -> RunEnergy:
    """Returns the energy of a window of readings, and that per emitted token; a reason instead where there is none."""
    facts, seconds = trace.facts, end_s - start_s
    try:
        joules = _joules(trace, faults, start_s, end_s)
    except DeviceError as error:
        return RunEnergy(facts=facts, reason=str(error))
    if tokens <= 0:
        return RunEnergy(facts=facts, joules=joules, seconds=seconds, reason="no token was emitted")
    per_token = of_error(joules.value / tokens, joules.error / tokens, joules.freedom, 1)
    return RunEnergy(facts=facts, joules=joules, joules_per_token=per_token, seconds=seconds)


def _joules(trace: Trace, faults: Sequence[tuple[float, str]], start_s: float, end_s: float) -> Interval:
    facts, expected = trace.facts, Characteristics.expected(trace.facts)
    need = MIN_REFRESHES * expected.refresh_s + expected.lead_in_s
    if end_s - start_s < need:
        raise MeasurementError(f"the run of {end_s - start_s:.3g} s is too short; this meter needs {need:.3g} s")
    if faults:
        raise MeasurementError(f"the meter failed: {faults[0][1]}")
    window = measure_window(trace, start_s, end_s, expected)
    if facts.kind is Kind.SAMPLER and window.updates < MIN_UPDATES:
        raise MeasurementError(f"the meter showed {window.updates} new values; {MIN_UPDATES} are needed")
    return of_model(of_error(window.joules, window.error_watts * window.seconds, window.freedom, 1), facts.model_error)


@dataclass(eq=False, kw_only=True)
class Share:
    """A running request: its start in seconds, and how many others ran meanwhile."""

    start_s: float
    others: int


class SharedWatch:
    """Reads a meter from a thread of its own while a request runs. `begin` and `end` never wait for the meter; any thread may call them."""

    def __init__(self, system: System, meter: Meter) -> None:
        self.facts = meter.facts
        self._system = system
        self._recorder = Recorder(system, meter, interval_s=watch_interval(meter.facts))
        self._open: list[Share] = []
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read_on, name="energy of requests", daemon=True)
        self._thread.start()

    def begin(self) -> Share:
        """Starts a request."""
        with self._changed:
            for share in self._open:
                share.others += 1
            share = Share(start_s=self._system.clock(), others=len(self._open))
            self._open.append(share)
            self._changed.notify()
        return share

    def end(self, share: Share, tokens: int) -> RunEnergy:
        """Ends a request of `tokens` emitted tokens; returns the machine's joules meanwhile, per token only if it ran alone."""
        end_s = self._system.clock()
        with self._changed:
            self._open.remove(share)
            oldest = min((other.start_s for other in self._open), default=end_s)
        trace, faults = self._recorder.snapshot(share.start_s)
        self._recorder.forget(oldest)
        energy = run_energy(trace, [f for f in faults if f[0] >= share.start_s], share.start_s, end_s, tokens)
        if not share.others:
            return energy
        reason = energy.reason or "other requests ran meanwhile: the joules are the whole machine's, and are not split"
        return replace(energy, joules_per_token=None, shared_with=share.others, reason=reason)

    def close(self) -> None:
        """Stops reading."""
        with self._changed:
            self._ended.set()
            self._changed.notify()
        self._thread.join()

    def _read_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._ended.is_set())
            if self._ended.is_set():
                return
            self._recorder.poll()
            self._ended.wait(self._recorder.next_interval())
