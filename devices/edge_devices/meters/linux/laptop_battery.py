"""Laptop batteries on Linux: watts of all batteries together, while they discharge."""

from __future__ import annotations

from edge_devices.errors import MeterError
from edge_devices.machine.power_supply import SUPPLIES, Supply, batteries, require_discharging, watts_of
from edge_devices.machine.system import System
from edge_devices.meters.base import Finding, Kind, MeterFacts, Sample, Scope, absent, present, usable

NAME = "battery"


class BatteryMeter:
    """The sum of the batteries' power, in watts."""

    def __init__(self, system: System, names: tuple[str, ...]) -> None:
        self._system = system
        self._names = names
        self.facts = MeterFacts(
            name=NAME,
            kind=Kind.SAMPLER,
            scope=Scope.DEVICE,
            source=", ".join(f"/{SUPPLIES}/{n}" for n in names),
            # The ACPI driver caches a value for 1000 ms (cache_time); the embedded controller may be slower, which is measured.
            refresh_s=1.0,
            resolution=0.01,
            poll_s=0.5,
            lag_s=2.0,
            needs="the charger unplugged",
            systematic="gauge gain 1-5 %",
            notes=("whole device: display and radios included",),
        )

    def read(self) -> Sample | None:
        """Reads all batteries; watts. None for an exact 0 while discharging: the gauge has no value yet."""
        supplies = [s for s in batteries(self._system) if s.name in self._names]
        if len(supplies) != len(self._names):
            raise MeterError(f"a battery of {', '.join(self._names)} is gone; measure again with all of them in place")
        require_discharging(self._system, supplies)
        watts = total_watts(supplies)
        return Sample(self._system.clock(), watts, _raw(supplies)) if watts > 0 else None


def total_watts(supplies: list[Supply]) -> float:
    """Returns the sum in watts; raises MeterError for a battery that reports no power."""
    total = 0.0
    for supply in supplies:
        watts = watts_of(supply)
        if watts is None:
            raise MeterError(f"{supply.name} reports neither power_now nor current_now with voltage_now; use a meter in the supply line")
        total += watts
    return total


def find(system: System) -> list[Finding]:
    """Returns the finding of this machine's batteries."""
    if system.is_android:
        return []
    try:
        supplies = batteries(system)
    except PermissionError:
        return [present(NAME, f"/{SUPPLIES} is denied to this user", "run as a user that may read it")]
    if not supplies:
        return [absent(NAME, f"no battery that feeds this machine below /{SUPPLIES}")]
    try:
        total_watts(supplies)
        require_discharging(system, supplies)
    except MeterError as error:
        return [present(NAME, str(error))]
    return [usable(BatteryMeter(system, tuple(s.name for s in supplies)))]


def _raw(supplies: list[Supply]) -> str:
    keys = ("STATUS", "POWER_NOW", "CURRENT_NOW", "VOLTAGE_NOW")
    return " ".join(f"{s.name}.{k}={s.fields[k]}" for s in supplies for k in keys if k in s.fields)
