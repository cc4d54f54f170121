"""The kernel's power_supply class: batteries and chargers of laptops and phones.

Facts: Documentation/ABI/testing/sysfs-class-power of Linux. The ABI says that a negative current discharges, real ACPI batteries say the
opposite: the direction is taken from `status` alone, the figure without its sign.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_devices.errors import MeterError
from edge_devices.machine.system import System

SUPPLIES = "sys/class/power_supply"
# A kilowatt and 100 A or V, in micro units: beyond are ACPI's words for an unknown value, such as 0xFFFFFFFF thousand.
MAX_VALUES = {"POWER_NOW": 10**9, "CURRENT_NOW": 10**8, "VOLTAGE_NOW": 10**8}


@dataclass(frozen=True, kw_only=True)
class Supply:
    """One battery's fields as the kernel prints them: micro units, or a maker's own."""

    name: str
    fields: dict[str, str]

    @property
    def status(self) -> str:
        """Discharging, Charging, Full, Not charging, or Unknown."""
        return self.fields.get("STATUS", "Unknown")

    def number(self, key: str) -> int | None:
        """Returns an integer field, or None if it is missing, or no battery of such a machine has so much."""
        try:
            value = int(self.fields[key])
        except (KeyError, ValueError):
            return None
        return value if abs(value) <= MAX_VALUES.get(key, abs(value)) else None


def parse_uevent(text: str) -> dict[str, str]:
    """Reads `POWER_SUPPLY_KEY=value` lines; a repeated key keeps its first value."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and key.startswith("POWER_SUPPLY_"):
            fields.setdefault(key.removeprefix("POWER_SUPPLY_"), value.strip())
    return fields


def batteries(system: System) -> list[Supply]:
    """Returns the batteries that feed this machine, without those of mice and headsets (scope Device)."""
    supplies = []
    for folder in system.paths(f"{SUPPLIES}/*"):
        fields = read_fields(system, folder)
        if fields.get("TYPE") == "Battery" and fields.get("SCOPE") != "Device" and fields.get("PRESENT") != "0":
            supplies.append(Supply(name=folder.rpartition("/")[2], fields=fields))
    return supplies


def read_fields(system: System, folder: str) -> dict[str, str]:
    """Reads one supply: its uevent, or its single files where that is not readable. Raises PermissionError when all are denied."""
    denied: PermissionError | None = None
    try:
        fields = parse_uevent(system.text(f"{folder}/uevent"))
    except OSError:
        fields = {}
    for key in ("type", "scope", "status", "present", "online", "power_now", "current_now", "voltage_now"):
        if key.upper() in fields:
            continue
        try:
            fields[key.upper()] = system.text(f"{folder}/{key}")
        except PermissionError as error:
            denied = error
        except OSError:
            continue
    if denied and not fields.keys() & {"TYPE", "STATUS", "POWER_NOW", "CURRENT_NOW"}:
        raise denied
    return fields


def external_power(system: System) -> str | None:
    """Returns the name of a charger that is on line, None on battery. The machine's own USB ports (scope Device) do not count."""
    for folder in system.paths(f"{SUPPLIES}/*"):
        try:
            fields = read_fields(system, folder)
        except PermissionError:
            continue
        if fields.get("TYPE") not in (None, "Battery") and fields.get("SCOPE") != "Device" and fields.get("ONLINE") not in (None, "0"):
            return folder.rpartition("/")[2]
    return None


def watts_of(supply: Supply) -> float | None:
    """Returns the power in watts from POWER_NOW (µW) or CURRENT_NOW (µA) × VOLTAGE_NOW (µV); None without either."""
    power = supply.number("POWER_NOW")
    if power is not None:
        return abs(power) * 1e-6
    current, voltage = supply.number("CURRENT_NOW"), supply.number("VOLTAGE_NOW")
    if current is None or voltage is None:
        return None
    return abs(current) * 1e-6 * voltage * 1e-6


def require_discharging(system: System, supplies: list[Supply]) -> None:
    """Raises MeterError unless the machine runs on its batteries alone. Of several, one discharges at a time; the others rest."""
    charger = external_power(system)
    if charger:
        raise MeterError(f"{charger} supplies power, and a battery's figures show the load only while unplugged; unplug the charger")
    charging = [s for s in supplies if s.status == "Charging"]
    if charging or not any(s.status == "Discharging" for s in supplies):
        statuses = ", ".join(f"{s.name} is {s.status}" for s in charging or supplies)
        raise MeterError(f"{statuses}, but only a discharging battery shows the energy used; unplug the charger")
