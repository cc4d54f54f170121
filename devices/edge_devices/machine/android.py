"""Battery and heat from Android's services, which also answer the shell user; most builds deny that user the files below /sys.

Facts: `dumpsys battery` (BatteryService) and `dumpsys thermalservice` (PowerManager.THERMAL_STATUS_*) of AOSP.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from edge_devices.errors import FrozenBatteryError, MeterError
from edge_devices.machine.system import System

THERMAL_NAMES = ("none", "light", "moderate", "severe", "critical", "emergency", "shutdown")
LIGHT, MODERATE = 1, 2
SECTION = "Current Battery Service state:"
FROZEN = "UPDATES STOPPED"


@dataclass(frozen=True, kw_only=True)
class PhoneState:
    """None where a value is unknown; `unknown`: what the services did not say, and why.

    `frozen`: `dumpsys battery unplug` or `set` was run, so the figures are not measured.
    """

    charger: str | None = None
    charge_percent: int | None = None
    battery_c: float | None = None
    thermal_status: int | None = None
    frozen: bool = False
    unknown: tuple[str, ...] = ()


def thermal_name(status: int | None) -> str:
    """Returns Android's name of a thermal status."""
    return THERMAL_NAMES[status] if status is not None and 0 <= status < len(THERMAL_NAMES) else str(status)


def read_phone(system: System) -> PhoneState:
    """Returns what both services report; never raises."""
    thermal = re.search(r"Thermal Status: (\d)\b", system.run(["dumpsys", "thermalservice"]).text)
    status = int(thermal[1]) if thermal else None
    unknown = () if thermal else ("whether Android throttles (`dumpsys thermalservice` shows no thermal status)",)
    try:
        fields = parse_dumpsys(system.run(["dumpsys", "battery"]).text)
    except MeterError as error:
        frozen = isinstance(error, FrozenBatteryError)
        return PhoneState(thermal_status=status, frozen=frozen, unknown=(*unknown, f"charge and charger ({error})"))
    powered = sorted(key.removesuffix(" powered") for key, value in fields.items() if key.endswith(" powered") and value == "true")
    level, tenths = fields.get("level", ""), fields.get("temperature", "")
    charge = int(level) if re.fullmatch(r"\d{1,3}", level) else None
    return PhoneState(
        charger=powered[0] if powered else None,
        charge_percent=charge,
        battery_c=int(tenths) / 10 if re.fullmatch(r"-?\d{1,4}", tenths) else None,
        thermal_status=status,
        unknown=unknown if charge is not None else (*unknown, "the battery's charge (`dumpsys battery` has no level)"),
    )


def parse_dumpsys(text: str) -> dict[str, str]:
    """Reads the battery service's own section of `dumpsys battery`, without a maker's section before it and event logs after it."""
    _, separator, section = text.partition(SECTION)
    if not separator:
        raise MeterError(f"`dumpsys battery` has no section {SECTION!r}; this version of Android is not supported")
    if FROZEN in section:
        raise FrozenBatteryError(f"the battery service is frozen ({FROZEN}) and returns made-up values; run `dumpsys battery reset` first")
    fields: dict[str, str] = {}
    for line in section.splitlines():
        if line.startswith("[EventLogBuffer]"):
            break
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields
