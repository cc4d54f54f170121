"""The state of a machine before and after a measurement, and what in it makes figures invalid.

What is bad excludes the measurement around it. What is not known is never taken for fine: `warnings` names it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from edge_devices.files.limited_read import parse_integer
from edge_devices.machine.android import LIGHT, MODERATE, PhoneState, read_phone, thermal_name
from edge_devices.machine.memory import byte_text
from edge_devices.machine.power_supply import Supply, batteries, external_power
from edge_devices.machine.system import System
from edge_devices.machine.throttling import read_throttling

# Bits of `vcgencmd get_throttled`: undervoltage, capped clock, throttled, soft temperature limit; bits 16 to 19 say the same of any time
# since the board started.
THROTTLED_NOW, THROTTLED_EVER = 0xF, 0xF0000
HEAT_NOW = 0xE
CHARGE_LIMITS = (30, 95)  # percent: below, the voltage sags; above, charging circuits interfere
HOTTEST = 120_000  # thousandths of a degree; some thermal zones report no temperature


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """A snapshot; None where a value is unknown, and `unknown` has what should be known on this machine and is not, with the reason.

    Frequencies in kHz, temperature in °C, swap in bytes, `clock_mhz` of the fastest processor; `thermal_status` is Android's, 0 to 6;
    `throttled`, `throttle_count` and `cooling` are those of `throttling.Throttling`.
    """

    throttled: int | None = None
    charger: str | None = None
    charge_percent: int | None = None
    swap_used: int | None = None
    thermal_status: int | None = None
    governors: tuple[str, ...] = ()
    frequency_caps: tuple[int, ...] = ()
    temperature_c: float | None = None
    clock_mhz: float | None = None
    throttle_count: int | None = None
    cooling: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def is_warm(self) -> bool:
        """Whether the machine slows down because of heat, or is about to."""
        firmware = self.throttled is not None and bool(self.throttled & HEAT_NOW)
        return firmware or bool(self.cooling) or (self.thermal_status or 0) >= LIGHT


def read_state(system: System) -> DeviceState:
    """Returns the current state; costs a few file reads, one command on a Raspberry Pi, two on Android (about 0.1 s)."""
    phone = read_phone(system) if system.is_android else PhoneState()
    supplies, charger, denied = _power(system)
    policies = system.paths("sys/devices/system/cpu/cpufreq/policy*")
    caps = [parse_integer(system.text_or(f"{p}/scaling_max_freq")) for p in policies]
    levels = [level for supply in supplies if (level := supply.number("CAPACITY")) is not None]
    throttling = read_throttling(system)
    charge = levels[0] if levels else phone.charge_percent
    governors = tuple(sorted({g for p in policies if (g := system.text_or(f"{p}/scaling_governor"))}))
    degrees = [t for t in (_temperature(system), phone.battery_c) if t is not None]
    swap = _swap_used(system)
    has_battery = bool(supplies) or system.is_android
    unknown = (
        throttling.unknown,
        *phone.unknown,
        denied if charge is None and not phone.unknown else "",
        "the battery's charge" if has_battery and charge is None and not denied and not phone.unknown else "",
        "" if governors else "the frequency governor",
        "" if degrees else "the temperature",
        "the swap in use" if swap is None else "",
    )
    return DeviceState(
        throttled=throttling.bits,
        charger=charger or phone.charger,
        charge_percent=charge,
        thermal_status=phone.thermal_status,
        swap_used=swap,
        governors=governors,
        frequency_caps=tuple(cap for cap in caps if cap is not None),
        temperature_c=max(degrees, default=None),
        clock_mhz=_clock_mhz(system, policies),
        throttle_count=throttling.count,
        cooling=throttling.cooling,
        unknown=tuple(filter(None, unknown)),
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
    if state.cooling:
        reasons.append(Refusal("throttled", f"the processor is throttled now ({', '.join(state.cooling)}): let it cool"))
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
    if state.governors and state.governors != ("performance",):
        remarks.append(f"the frequency governor is {', '.join(state.governors)}: clocks follow the load")
    if state.throttled is not None and state.throttled & THROTTLED_EVER:
        remarks.append(
            f"the board throttled before (get_throttled {state.throttled:#x}), so that a short throttling of the same kind cannot be seen"
            " until it is restarted"
        )
    if state.unknown:
        remarks.append(f"not known: {', '.join(state.unknown)}")
    return remarks


def throttling(state: DeviceState) -> list[str]:
    """Returns in what way the machine throttled in this state."""
    sentences = []
    if state.throttled is not None and state.throttled & THROTTLED_NOW:
        sentences.append(_board_throttled(state.throttled))
    if state.cooling:
        sentences.append(f"the processor throttled ({', '.join(state.cooling)})")
    if (state.thermal_status or 0) >= MODERATE:
        sentences.append(f"Android throttled because of heat (thermal status {thermal_name(state.thermal_status)})")
    return sentences


def changes(before: DeviceState, after: DeviceState) -> list[str]:
    """Returns the changes between two snapshots that make the run between them invalid."""
    sentences = []
    if after.throttled is not None and after.throttled & ~(before.throttled or 0) & THROTTLED_EVER:
        sentences.append(_board_throttled(after.throttled))
    if after.throttle_count is not None and before.throttle_count is not None and after.throttle_count > before.throttle_count:
        sentences.append("the processor throttled because of heat")
    if before.charger != after.charger:
        sentences.append(f"the power source changed from {before.charger or 'battery'} to {after.charger or 'battery'}")
    if before.frequency_caps != after.frequency_caps:
        sentences.append("the processor's frequency cap changed")
    if before.swap_used is not None and after.swap_used is not None and after.swap_used > before.swap_used:
        sentences.append(f"{byte_text(after.swap_used - before.swap_used)} were swapped out")
    return sentences


def disturbances(before: DeviceState, after: DeviceState) -> list[str]:
    """Returns what makes the run between two snapshots invalid: throttling at either, or a change from one to the other."""
    return list(dict.fromkeys([*throttling(before), *throttling(after), *changes(before, after)]))


def _board_throttled(bits: int) -> str:
    return f"the board throttled (get_throttled {bits:#x})"


def _power(system: System) -> tuple[list[Supply], str | None, str]:
    """Returns batteries and charger, and why they are not known, empty where they are."""
    try:
        return batteries(system), external_power(system), ""
    except PermissionError:
        return [], None, "charge and charger (permission denied below /sys/class/power_supply)"


def _swap_used(system: System) -> int | None:
    sizes = dict(re.findall(r"^(SwapTotal|SwapFree):\s+(\d{1,18}) kB", system.text_or("proc/meminfo"), re.MULTILINE))
    return (int(sizes["SwapTotal"]) - int(sizes["SwapFree"])) * 1024 if len(sizes) == 2 else None


def _temperature(system: System) -> float | None:
    texts = [system.text_or(p) for p in system.paths("sys/class/thermal/thermal_zone*/temp")]
    degrees = [int(t) for t in texts if re.fullmatch(r"\d{4,6}", t) and int(t) <= HOTTEST]
    return max(degrees) / 1000 if degrees else None


def _clock_mhz(system: System, policies: list[str]) -> float | None:
    khz = [clock for p in policies if (clock := parse_integer(system.text_or(f"{p}/scaling_cur_freq"))) is not None]
    if khz:
        return max(khz) / 1000
    megahertz = re.findall(r"^cpu MHz\s*:\s*(\d{1,6}(?:\.\d{1,6})?)$", system.text_or("proc/cpuinfo"), re.MULTILINE)
    return max(map(float, megahertz), default=None)
