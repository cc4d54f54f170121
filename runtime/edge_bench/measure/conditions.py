"""The machine's state around each measurement: its clock, its temperature, and disturbances. A warm machine rests before the next one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from edge_devices.machine.state import disturbances, read_state, warnings
from edge_devices.machine.system import System
from edge_devices.waiting import Waiting, silent_wait

# Reading the state takes up to 0.1 s (two commands on Android), which must be short compared with the measurement.
SHORTEST_SECONDS = 1.0
REST_STEP_SECONDS, LONGEST_REST_SECONDS, ALL_REST_SECONDS = 5.0, 120.0, 600.0


@dataclass(frozen=True, kw_only=True)
class MachineConditions:
    """The state after a measurement: the clock of the fastest processor and the highest temperature; None if unknown.

    `bad` has the reasons why the measurement does not count; it is empty if it counts. `unknown` names what can no longer be read.
    """

    clock_mhz: float | None = None
    temperature_c: float | None = None
    bad: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


class Timed(Protocol):
    """A measurement. `conditions` is None if it was too short to read them; then the next measurement's conditions hold for it too."""

    @property
    def conditions(self) -> MachineConditions | None: ...


Measured = TypeVar("Measured", bound=Timed)


def undisturbed(measurements: Iterable[Measured]) -> tuple[list[Measured], dict[str, int]]:
    """Returns the measurements that count, and for each reason, how many do not count."""
    good, reasons, pending = list[Measured](), dict[str, int](), list[Measured]()
    for each in measurements:
        pending.append(each)
        if each.conditions is None:
            continue
        for reason in each.conditions.bad:
            reasons[reason] = reasons.get(reason, 0) + len(pending)
        good += [] if each.conditions.bad else pending
        pending = []
    return good + pending, reasons


class ConditionsWatch:
    """Reads the machine's state between measurements. `remarks` is about its state at the beginning, for readers of the figures."""

    def __init__(self, system: System | None = None, waiting: Waiting = silent_wait) -> None:
        """Rests at once if the machine is already warm."""
        self._system, self._waiting = system or System(), waiting
        self._rests, self._rested_s, self._hopeless = 0, 0.0, False
        self._state, self._read_s = read_state(self._system), self._system.clock()
        self.remarks = warnings(self._state)
        self._known_missing = set(self._state.unknown)
        if self._state.is_warm:
            self._rest()

    def next(self) -> MachineConditions | None:
        """Returns the conditions since they were last returned; None if that is too short ago. Lets a warm machine rest."""
        if self._system.clock() - self._read_s < SHORTEST_SECONDS:
            return None
        state = read_state(self._system)
        bad = disturbances(self._state, state)
        lost = tuple(text for text in state.unknown if text not in self._known_missing)
        throttled = state.is_warm or state.throttle_count != self._state.throttle_count
        self._state, self._read_s = state, self._system.clock()
        if throttled:
            self._rest()
        return MachineConditions(clock_mhz=state.clock_mhz, temperature_c=state.temperature_c, bad=tuple(bad), unknown=lost)

    def rested(self) -> str:
        """Returns a sentence about the rests so far; empty if there were none."""
        if not self._rests:
            return ""
        end = ", and was still warm, so that it did not rest again" if self._hopeless else ""
        times = "once" if self._rests == 1 else f"{self._rests} times"
        return f"the device was warm and rested {times}, {self._rested_s:.0f} s in all{end}"

    def _rest(self) -> None:
        """Waits until the machine is no longer warm. If it stays warm, as in the sun, later calls do not wait again."""
        if self._hopeless or self._rested_s >= ALL_REST_SECONDS:
            return
        begin = self._system.clock()
        with self._waiting("the device is warm and rests") as report:
            while True:
                self._system.sleep(REST_STEP_SECONDS)
                self._state, resting_s = read_state(self._system), self._system.clock() - begin
                report(min(0.99, resting_s / LONGEST_REST_SECONDS), f"{resting_s:.0f} s")
                if not self._state.is_warm or resting_s >= LONGEST_REST_SECONDS:
                    break
        self._rests += 1
        self._rested_s += resting_s
        self._hopeless = self._state.is_warm
        self._read_s = self._system.clock()
