"""The state of a machine before and after a measurement, and what in it makes energy figures invalid."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from edge_devices.files.limited_read import parse_integer
from edge_devices.machine.android import MODERATE, read_phone, thermal_name
from edge_devices.machine.memory import byte_text
from edge_devices.machine.power_supply import batteries, external_power
from edge_devices.machine.system import System

THROTTLED_NOW, THROTTLED_EVER = 0xF, 0xF0000  # bits 0-3 and 16-19 of `vcgencmd get_throttled`
CHARGE_LIMITS = (30, 95)  # percent: below, the voltage sags; above, charging circuits interfere
HOTTEST = 120_000  # thousandths of a degree; some thermal zones report no temperature


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """A snapshot; None where a value is unknown.

    Frequencies in kHz, temperature in °C, swap in bytes; `thermal_status` is Android's, 0 to 6.
    """

    throttled: int | None = None
    charger: str | None = None
    charge_percent: int | None = None
    swap_used: int | None = None
    thermal_status: int | None = None
    governors: tuple[str, ...] = ()
    frequency_caps: tuple[int, ...] = ()
    temperature_c: float | None = None


def read_state(system: System) -> DeviceState:
    """Returns the current state; costs a few file reads, one command on a Raspberry Pi, two on Android (about 0.1 s)."""
    phone = read_phone(system) if system.is_android else None
    try:
        supplies, charger = batteries(system), external_power(system)
    except PermissionError:
        supplies, charger = [], None
    policies = system.paths("sys/devices/system/cpu/cpufreq/policy*")
    caps = [parse_integer(system.text_or(f"{p}/scaling_max_freq")) for p in policies]
    return DeviceState(
        throttled=_throttled(system),
        charger=charger or (phone.charger if phone else None),
        charge_percent=next(
            (s.number("CAPACITY") for s in supplies if s.number("CAPACITY") is not None), phone.charge_percent if phone else None
        ),
        thermal_status=phone.thermal_status if phone else None,
        swap_used=_swap_used(system),
        governors=tuple(sorted({g for p in policies if (g := system.text_or(f"{p}/scaling_governor"))})),
        frequency_caps=tuple(cap for cap in caps if cap is not None),
        temperature_c=max((t for t in (_temperature(system), phone.battery_c if phone else None) if t is not None), default=None),
    )


class Refusal(NamedTuple):
    """Why nothing should be measured."""

    code: Literal["throttled", "heat", "charger", "charge"]
    sentence: str


def refusals(state: DeviceState, *, at_battery: bool) -> list[Refusal]:
    """Returns why nothing should be measured in this state. `at_battery`: energy is read from the device's own battery."""
    reasons = []
    if state.throttled is not None and state.throttled & THROTTLED_NOW:
        sentence = f"the board is throttled now (get_throttled {state.throttled:#x}): cool it, or give it a stronger supply"
        reasons.append(Refusal("throttled", sentence))
    if state.thermal_status is not None and state.thermal_status >= MODERATE:
        sentence = f"Android throttles because of heat (thermal status {thermal_name(state.thermal_status)}): let it cool"
        reasons.append(Refusal("heat", sentence))
    if at_battery and state.charger:
        reasons.append(Refusal("charger", f"{state.charger} supplies power: unplug it to measure at the battery"))
    if at_battery and state.charge_percent is not None and not CHARGE_LIMITS[0] <= state.charge_percent <= CHARGE_LIMITS[1]:
        sentence = f"the battery is at {state.charge_percent} %: measure between {CHARGE_LIMITS[0]} and {CHARGE_LIMITS[1]} %"
        reasons.append(Refusal("charge", sentence))
    return reasons


def warnings(state: DeviceState) -> list[str]:
    """Returns remarks on this state for readers of the figures."""
    remarks = []
    if state.swap_used:
        remarks.append(f"{byte_text(state.swap_used)} of swap are in use")
    if not state.governors:
        remarks.append("the frequency governor is not known")
    elif state.governors != ("performance",):
        remarks.append(f"the frequency governor is {', '.join(state.governors)}: clocks follow the load")
    return remarks


def disturbances(before: DeviceState, after: DeviceState) -> list[str]:
    """Returns the changes between two snapshots that make the run between them invalid."""
    changes = []
    if after.throttled is not None and (after.throttled & THROTTLED_NOW or after.throttled & ~(before.throttled or 0) & THROTTLED_EVER):
        changes.append(f"the board throttled (get_throttled {after.throttled:#x})")
    if (after.thermal_status or 0) >= MODERATE and after.thermal_status != before.thermal_status:
        changes.append(f"Android throttled because of heat (thermal status {thermal_name(after.thermal_status)})")
    if before.charger != after.charger:
        changes.append(f"the power source changed from {before.charger or 'battery'} to {after.charger or 'battery'}")
    if before.frequency_caps != after.frequency_caps:
        changes.append("the processor's frequency cap changed")
    if before.swap_used is not None and after.swap_used is not None and after.swap_used > before.swap_used:
        changes.append(f"{byte_text(after.swap_used - before.swap_used)} were swapped out")
    return changes


def _throttled(system: System) -> int | None:
    if not system.text_or("proc/device-tree/model").startswith("Raspberry Pi"):
        return None
    match = re.search(r"throttled=0x([0-9a-fA-F]{1,8})\b", system.run(["vcgencmd", "get_throttled"]).text)
    return int(match[1], 16) if match else None


def _swap_used(system: System) -> int | None:
    sizes = dict(re.findall(r"^(SwapTotal|SwapFree):\s+(\d{1,18}) kB", system.text_or("proc/meminfo"), re.MULTILINE))
    return (int(sizes["SwapTotal"]) - int(sizes["SwapFree"])) * 1024 if len(sizes) == 2 else None


def _temperature(system: System) -> float | None:
    texts = [system.text_or(p) for p in system.paths("sys/class/thermal/thermal_zone*/temp")]
    degrees = [int(t) for t in texts if re.fullmatch(r"\d{4,6}", t) and int(t) <= HOTTEST]
    return max(degrees) / 1000 if degrees else None
