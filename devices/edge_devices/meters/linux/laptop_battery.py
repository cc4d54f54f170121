"""Laptop batteries on Linux: watts of all batteries together, while they discharge."""

from __future__ import annotations

from edge_devices.errors import MeterError
from edge_devices.machine.state import SUPPLIES, Supply, batteries, require_discharging, watts_of
from edge_devices.machine.system import System
from edge_devices.meters.base import Finding, Kind, MeterFacts, Scope, SumMeter, absent, present, usable

NAME = "battery"


def battery_meter(system: System, names: tuple[str, ...]) -> SumMeter:
    """Returns the meter of the batteries' power together, in watts."""
    facts = MeterFacts(
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

    def read() -> list[tuple[str, float]] | None:
        supplies = [s for s in batteries(system) if s.name in names]
        if len(supplies) != len(names):
            raise MeterError(f"a battery of {', '.join(names)} is gone; measure again with all of them in place")
        require_discharging(system, supplies)
        parts = watts_by_battery(supplies)
        return parts if any(watts for _, watts in parts) else None  # an exact 0 while discharging: the gauge has no value yet

    return SumMeter(system, facts, read)


def watts_by_battery(supplies: list[Supply]) -> list[tuple[str, float]]:
    """Returns the watts of each battery, 0 for one that rests; raises MeterError for one that discharges and reports no power."""
    parts = []
    for supply in supplies:
        watts = watts_of(supply) if supply.status == "Discharging" else 0.0
        if watts is None:
            raise MeterError(f"{supply.name} reports neither power_now nor current_now with voltage_now; use a meter in the supply line")
        parts.append((supply.name, watts))
    return parts


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
        require_discharging(system, supplies)
        watts_by_battery(supplies)
    except MeterError as error:
        return [present(NAME, str(error))]
    return [usable(battery_meter(system, tuple(s.name for s in supplies)))]
