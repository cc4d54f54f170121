"""The battery gauge of an Android device: through the battery service (works for the shell user), or through its sysfs files.

The specification requires microamperes, positive while charging; makers differ in both. The sign is dropped, and the charging status gives
the direction. The unit is the one in which an idle device takes 0.1 to 6 W (3 W in mA), which is true of one unit only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from edge_devices.errors import MeterError
from edge_devices.machine.state import SUPPLIES, Supply, external_power, parse_dumpsys, read_fields
from edge_devices.machine.system import System
from edge_devices.meters.android.perfetto import record_current
from edge_devices.meters.base import Finding, Kind, MeterFacts, Scope, SumMeter, absent, present, usable

AMPERES = {"µA": 1e-6, "mA": 1e-3}
# Watts of an idle device that is awake. Asleep, its microamperes would read as milliamperes, a thousand times as much: 3 mW or more.
PLAUSIBLE_WATTS = {"µA": (0.1, 6.0), "mA": (0.1, 3.0)}
UNSUPPORTED = -(1 << 31)
DISCHARGING = "3"  # BatteryManager.BATTERY_STATUS_DISCHARGING
CELL_VOLTS, MAX_CELL_VOLTS = 3.85, 5.0
PACK_VOLTS = (2.5, 10.0)  # one or two lithium cells in series
TWO_CELL_MAKERS = ("oneplus", "oppo", "realme", "vivo")
NAME, SYSFS = "android:battery", "android:battery-sysfs"
SYSFS_NAMES = ("battery", "bms", "main")
_ATTEMPTS = 8  # readings of a gauge, half a second apart, until one has a current
UNPLUG = "unplug the cable and measure on the device alone; never use `dumpsys battery unplug`, which only fakes it"


class Gauge(NamedTuple):
    """One reading of a gauge: current in its own unit and sign, and volts. `current` is None for a false zero."""

    current: int | None
    volts: float


def volts_of(text: str) -> float:
    """Reads the voltage: millivolts, on some systems microvolts or whole volts, which stand for the middle of what a cell can have."""
    if not re.fullmatch(r"\d{1,8}", text) or not int(text):
        raise MeterError(f"the battery's voltage reads {text!r}, which is not a voltage; use another meter")
    number = int(text)
    volts = number * 1e-6 if number >= 1_000_000 else number * 1e-3 if number >= 100 else CELL_VOLTS * max(1, round(number / CELL_VOLTS))
    if not PACK_VOLTS[0] <= volts <= PACK_VOLTS[1]:
        raise MeterError(f"the battery's voltage reads {text!r}, {volts:g} V, which no phone's battery has; use another meter")
    return volts


def voltage_notes(text: str, maker: str) -> tuple[str, ...]:
    """Returns what a reader of the figures must know of the voltage they were computed with."""
    if re.fullmatch(r"\d{1,2}", text):
        return (f"the voltage is told in whole volts ({text}): {volts_of(text):g} V taken, up to 15 % off",)
    if volts_of(text) > MAX_CELL_VOLTS:
        return (f"{volts_of(text):.3g} V: two cells in series, and their power together",)
    if maker.lower() in TWO_CELL_MAKERS:
        return (f"{maker} builds phones with two cells in series: if this is one, its power is twice these figures; compare a USB meter's",)
    return ()


def require_unplugged(fields: dict[str, str]) -> None:
    """Raises MeterError unless the service reports that the device discharges and no charger powers it."""
    powered = sorted(k for k, v in fields.items() if k.endswith(" powered") and v == "true")
    if powered:
        raise MeterError(f"{powered[0]}: a battery's figures mean the load only while unplugged; {UNPLUG}")
    if fields.get("status") != DISCHARGING:
        raise MeterError(f"the battery's status is {fields.get('status')}, not {DISCHARGING} (discharging); {UNPLUG}")


def current_unit(current: int, volts: float) -> str:
    """Returns the one unit in which this current is a plausible power for an idle device; raises MeterError if none is."""
    for unit, amperes in AMPERES.items():
        low, high = PLAUSIBLE_WATTS[unit]
        if low <= abs(current) * amperes * volts <= high:
            return unit
    raise MeterError(
        f"a current of {current} at {volts:g} V is no idle power in microamperes (0.1 to 6 W) or milliamperes (0.1 to 3 W): "
        "it sleeps or works; turn the screen on, stop other work, and try again"
    )


def gauge_meter(system: System, name: str, source: str, read_gauge: Callable[[System], Gauge], notes: tuple[str, ...]) -> SumMeter:
    """Returns the meter of current × voltage of a gauge, in watts; the unit follows from the first current that is not 0."""
    unit = _first_unit(system, read_gauge)
    facts = MeterFacts(
        name=name,
        kind=Kind.SAMPLER,
        scope=Scope.DEVICE,
        source=source,
        # Measured on one phone: new values every 2.0 s in the median, 7 s at most; a load shows after up to 7 s. Both are measured.
        refresh_s=2.0,
        resolution=AMPERES[unit] * 4.0,
        poll_s=0.5,
        lag_s=7.0,
        needs="the cable unplugged",
        systematic="gauge gain 1-5 %",
        notes=(f"current taken as {unit}, sign dropped", "whole device: display and radios included", *notes),
    )

    def read() -> list[tuple[str, float]] | None:
        gauge = read_gauge(system)
        return [(f"{gauge.volts:g} V", abs(gauge.current) * AMPERES[unit] * gauge.volts)] if gauge.current else None

    return SumMeter(system, facts, read)


def _first_unit(system: System, read_gauge: Callable[[System], Gauge]) -> str:
    for _ in range(_ATTEMPTS):
        gauge = read_gauge(system)
        if gauge.current:
            return current_unit(gauge.current, gauge.volts)
        system.sleep(0.5)
    raise MeterError(f"the gauge answered no current {_ATTEMPTS} times; it may not measure one; use a meter in the supply line")


def read_service(system: System) -> Gauge:
    """Reads the battery service; raises MeterError if it is frozen, the device is charging, or it reports no current."""
    state = system.run(["dumpsys", "battery"])
    if state.code != 0:
        raise MeterError(f"`dumpsys battery` failed: {state.errors.strip() or state.code}")
    fields = parse_dumpsys(state.text)
    require_unplugged(fields)
    return Gauge(_service_current(system, fields) or None, volts_of(fields.get("voltage", "")))


def _service_current(system: System, fields: dict[str, str]) -> int:
    """The current from `cmd battery`, from Samsung's line in `dumpsys battery`, or from perfetto."""
    answer = system.run(["cmd", "battery", "get", "-f", "current_now"])
    text = answer.text.strip()
    if not re.fullmatch(r"-?\d{1,12}", text) or int(text) == UNSUPPORTED:
        text = fields.get("current now", "")
    if re.fullmatch(r"-?\d{1,12}", text):
        return int(text)
    current = record_current(system)
    if current is None:
        raise MeterError(
            f"`cmd battery get -f current_now` answered {answer.first_line!r}, and neither `dumpsys battery` nor perfetto has the current;"
            " use a meter in the supply line"
        )
    return current


def read_sysfs(system: System, folder: str) -> Gauge:
    """Reads the gauge's files; raises MeterError if access is denied, the device is charging, or values are missing."""
    try:
        supply = Supply(name=folder.rpartition("/")[2], fields=read_fields(system, folder))
    except PermissionError as error:
        raise MeterError(f"/{folder} is denied to this user") from error
    charger = external_power(system)
    if charger:
        raise MeterError(f"{charger} supplies power; {UNPLUG}")
    if supply.status not in ("Discharging", "Unknown"):
        raise MeterError(f"/{folder} says {supply.status}; {UNPLUG}")
    current, microvolts = supply.number("CURRENT_NOW"), supply.number("VOLTAGE_NOW")
    if current is None or not microvolts:
        raise MeterError(f"/{folder} tells no current_now with voltage_now; use another meter")
    return Gauge(current or None, microvolts * 1e-6)


def find(system: System) -> list[Finding]:
    """Returns the findings of both ways to the gauge; an empty list on other machines."""
    if not system.is_android:
        return []
    findings = [_finding(system, NAME, "cmd battery get -f current_now, dumpsys battery or perfetto", read_service)]
    folders = [f"{SUPPLIES}/{n}" for n in SYSFS_NAMES if system.exists(f"{SUPPLIES}/{n}")]
    if not folders:
        return [*findings, absent(SYSFS, f"none of {', '.join(SYSFS_NAMES)} below /{SUPPLIES}")]
    return [*findings, _finding(system, SYSFS, f"/{folders[0]}", lambda s: read_sysfs(s, folders[0]))]


def _finding(system: System, name: str, source: str, read_gauge: Callable[[System], Gauge]) -> Finding:
    try:
        return usable(gauge_meter(system, name, source, read_gauge, _notes(system)))
    except MeterError as error:
        denied = isinstance(error.__cause__, PermissionError)
        return present(name, str(error), "use android:battery, which the shell user may read; or root" if denied else "")


def _notes(system: System) -> tuple[str, ...]:
    maker = system.run(["getprop", "ro.product.manufacturer"]).text.strip()
    try:
        return voltage_notes(parse_dumpsys(system.run(["dumpsys", "battery"]).text).get("voltage", ""), maker[:32])
    except MeterError:  # a frozen service, or none: the gauge's own reading says so
        return ()
