"""Energy of requests that run at the same time on one machine: one meter, read while any of them runs.

A meter sees the machine, not a request. The joules of a request are those of the machine while it ran; they are not split between requests that ran together.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from edge_devices.energy.live import RunEnergy, run_energy, watch_interval
from edge_devices.energy.recorder import Recorder
from edge_devices.machine.system import System
from edge_devices.meters.base import Meter


@dataclass(eq=False, kw_only=True)
class Share:
    """One request that runs: since when, and how many others ran meanwhile."""

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
        """A request begins."""
        with self._changed:
            for share in self._open:
                share.others += 1
            share = Share(start_s=self._system.clock(), others=len(self._open))
            self._open.append(share)
            self._changed.notify()
        return share

    def end(self, share: Share, tokens: int) -> RunEnergy:
        """The request is over and emitted so many tokens: returns the machine's joules meanwhile; per token only if it ran alone."""
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
        """Ends the reading."""
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
