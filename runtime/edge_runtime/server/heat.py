"""The heat of the machine that serves: a line for the operator when temperature, clock or throttling change, and gauges.

Heat makes a machine slow, but a request's figures do not show it. The wide forwards that verify drafts slow down first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from edge_devices.machine.state import DeviceState, read_state, throttling
from edge_devices.machine.system import System
from edge_runtime.session.monitor import Metric, gauge

SECONDS = 10.0
# Reported changes: by at least this many degrees Celsius, or of the clock by at least this factor, down or up.
DEGREES = 10.0
CLOCK_RATIO = 0.75


class HeatWatch:
    """Reads the state of `system` every `seconds`, in a thread, and reports changes between readings. Must be closed.

    Only readings while requests run count, as `busy` says: an idle processor's low clock means nothing.
    """

    def __init__(
        self, notify: Callable[[str], None], busy: Callable[[], bool], *, system: System | None = None, seconds: float = SECONDS
    ) -> None:
        self._notify, self._busy, self._system, self._seconds = notify, busy, system or System(), seconds
        self._newest = read_state(self._system)
        self._told: DeviceState | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="edge-mtp heat", daemon=True)
        self._thread.start()

    def metrics(self) -> list[Metric]:
        """Returns the gauges of the newest reading."""
        state = self._newest
        known = [
            ("edge_mtp_temperature_celsius", "Temperature of the hottest sensor.", state.temperature_c),
            ("edge_mtp_clock_megahertz", "Clock of the fastest processor.", state.clock_mhz),
            ("edge_mtp_throttle_count", "How often the processors were throttled since they started.", state.throttle_count),
        ]
        slowed = gauge("edge_mtp_throttled", "Whether the machine slows down because of heat or supply.", int(bool(throttling(state))))
        return [*(gauge(name, description, value) for name, description, value in known if value is not None), slowed]

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(self._seconds):
            self._newest = state = read_state(self._system)
            if self._busy():
                if self._told is not None and differs(self._told, state):
                    self._notify(f"heat: {described(self._told)}, now {described(state)}")
                    self._told = state
                self._told = self._told or state


def differs(before: DeviceState, after: DeviceState) -> bool:
    """Whether a change is worth reporting to the operator."""
    if throttling(before) != throttling(after) or (after.throttle_count or 0) > (before.throttle_count or 0):
        return True
    if before.temperature_c is not None and after.temperature_c is not None and abs(after.temperature_c - before.temperature_c) >= DEGREES:
        return True
    if not (before.clock_mhz and after.clock_mhz):
        return False
    return not CLOCK_RATIO < after.clock_mhz / before.clock_mhz < 1 / CLOCK_RATIO


def described(state: DeviceState) -> str:
    """Returns what is known of a state, such as "61 °C at 2.40 GHz"."""
    degrees = [] if state.temperature_c is None else [f"{state.temperature_c:.0f} °C"]
    clock = [] if state.clock_mhz is None else [f"{state.clock_mhz / 1000:.2f} GHz"]
    throttled = ["; ".join(throttling(state))] if throttling(state) else []
    counted = [f"throttled {state.throttle_count} times since it started"] if state.throttle_count else []
    return ", ".join([" at ".join([*degrees, *clock]), *throttled, *counted]).strip(", ") or "nothing known"
