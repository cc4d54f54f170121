"""The state of a machine around a measurement: heat, throttling and power supply, and which states make figures invalid."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from edge_devices.errors import FrozenBatteryError, MeterError, byte_text
from edge_devices.files.limited_read import parse_integer
from edge_devices.machine.system import NOT_FOUND, System, files_below

# Facts about throttling: `vcgencmd get_throttled` (Raspberry Pi documentation), arch/x86/kernel/cpu/mce/therm_throt.c and
# Documentation/driver-api/thermal/sysfs-api.rst of Linux.

# Older systems have it in /opt/vc/bin, which is not in the PATH of a shell without a login.
VCGENCMD = ("vcgencmd", "/usr/bin/vcgencmd", "/opt/vc/bin/vcgencmd")
VCGENCMD_REMEDY = "vcgencmd needs /dev/vcio: sudo usermod -aG video $USER, then log in again"
COUNTERS = "sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/*_throttle_count"
COOLING = "sys/class/thermal/cooling_device*"
MICROCODE = "sys/devices/system/cpu/cpu0/microcode"  # x86 processors have it
# Types of cooling devices that slow a processor down: ACPI's, cpufreq's, Intel's idle injection. Others, such as fans, do not match.
SLOWS = re.compile(r"processor|cpufreq|cpuidle|thermal-idle|powerclamp|cpu[-_](\d|cluster|isolate|hotplug)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Throttling:
    """Whether the processor is throttled.

    `bits` is a Raspberry Pi's get_throttled. `count` is how often Intel's processors were throttled since they started. `cooling` are the
    cooling devices that slow the processor down now. `unknown` says what is not known, and why; it is empty if all is known."""

    bits: int | None = None
    count: int | None = None
    cooling: tuple[str, ...] = ()
    unknown: str = ""


def read_throttling(system: System) -> Throttling:
    """Reads the state of throttling from a few files, or on a Raspberry Pi with a command. Never raises."""
    devices = _cooling_devices(system)
    cooling = tuple(name for name, state in devices if state > 0)
    if system.text_or("proc/device-tree/model").startswith("Raspberry Pi"):
        bits, reason = _firmware_bits(system)
        return Throttling(bits=bits, cooling=cooling, unknown=f"whether the board throttles ({reason})" if reason else "")
    counts = [count for path in system.paths(COUNTERS) if (count := parse_integer(system.text_or(path))) is not None]
    if counts:
        return Throttling(count=sum(counts), cooling=cooling)
    # The kernel's cooling devices do not say all about x86 processors, because these also slow themselves down.
    known = system.is_android or (bool(devices) and not system.exists(MICROCODE))
    return Throttling(cooling=cooling, unknown="" if known else "whether the processor throttles (this system has no counter of it)")


def _firmware_bits(system: System) -> tuple[int | None, str]:
    """Returns the bits of `vcgencmd get_throttled`, or None and the reason."""
    for command in VCGENCMD:
        done = system.run([command, "get_throttled"])
        if done.code == NOT_FOUND:
            continue
        match = re.search(r"throttled=0x([0-9a-fA-F]{1,8})\b", done.text) if done.code == 0 else None
        return (int(match[1], 16), "") if match else (None, f"vcgencmd get_throttled: {done.first_line}; {VCGENCMD_REMEDY}")
    return None, "vcgencmd is not installed; install Raspberry Pi OS's raspi-utils"


def _cooling_devices(system: System) -> list[tuple[str, int]]:
    """Returns type and state of each cooling device that can slow the processor down. State 0 means that it does not now."""
    devices = []
    for folder in system.paths(COOLING):
        kind, state = system.text_or(f"{folder}/type"), parse_integer(system.text_or(f"{folder}/cur_state"))
        if SLOWS.search(kind) and state is not None:
            devices.append((kind, state))
    return devices


# Android's services answer the shell user, who may not read the files below /sys on most builds. Facts: `dumpsys battery`
# (BatteryService) and `dumpsys thermalservice` (PowerManager.THERMAL_STATUS_*) of AOSP.

THERMAL_NAMES = ("none", "light", "moderate", "severe", "critical", "emergency", "shutdown")
LIGHT, MODERATE = 1, 2
SECTION = "Current Battery Service state:"
FROZEN = "UPDATES STOPPED"


@dataclass(frozen=True, kw_only=True)
class PhoneState:
    """The state of an Android device, from its services.

    Unknown values are None. `unknown` says what the services did not report, and why. `frozen` means that `dumpsys battery unplug` or `set`
    was run, so the values are not measured.
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
    """Returns what the battery and the thermal service report. Never raises."""
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
    """Parses the battery service's section of `dumpsys battery`, without a maker's section before it and event logs after it."""
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


# Batteries and chargers. Facts: Documentation/ABI/testing/sysfs-class-power of Linux. By the ABI, a negative current means discharging, but
# real ACPI batteries do the opposite. So only `status` gives the direction, and the sign of the current is ignored.

SUPPLIES = "sys/class/power_supply"
SUPPLY_FIELDS = ("type", "scope", "status", "present", "online", "power_now", "current_now", "voltage_now")
SUPPLY_FILES = files_below(f"{SUPPLIES}/*", " ".join(("uevent", *SUPPLY_FIELDS)))
# A kilowatt, and 100 A or V, in micro units. Larger values are ACPI's codes for unknown ones, such as 0xFFFFFFFF times 1000.
MAX_VALUES = {"POWER_NOW": 10**9, "CURRENT_NOW": 10**8, "VOLTAGE_NOW": 10**8}


@dataclass(frozen=True, kw_only=True)
class Supply:
    """The fields of one battery as the kernel prints them, in micro units or in a maker's own units."""

    name: str
    fields: dict[str, str]

    @property
    def status(self) -> str:
        """Discharging, Charging, Full, Not charging, or Unknown."""
        return self.fields.get("STATUS", "Unknown")

    def number(self, key: str) -> int | None:
        """Returns an integer field, or None if it is missing or impossibly large."""
        try:
            value = int(self.fields[key])
        except (KeyError, ValueError):
            return None
        return value if abs(value) <= MAX_VALUES.get(key, abs(value)) else None


def parse_uevent(text: str) -> dict[str, str]:
    """Parses `POWER_SUPPLY_KEY=value` lines. If a key is repeated, its first value is kept."""
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
    """Reads one supply from its uevent, and missing fields from single files. Raises PermissionError if all are denied."""
    denied: PermissionError | None = None
    try:
        fields = parse_uevent(system.text(f"{folder}/uevent"))
    except OSError:
        fields = {}
    for key in SUPPLY_FIELDS:
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
    """Returns the name of a connected charger; None on battery. The machine's own USB ports (scope Device) are ignored."""
    for folder in system.paths(f"{SUPPLIES}/*"):
        try:
            fields = read_fields(system, folder)
        except PermissionError:
            continue
        if fields.get("TYPE") not in (None, "Battery") and fields.get("SCOPE") != "Device" and fields.get("ONLINE") not in (None, "0"):
            return folder.rpartition("/")[2]
    return None


def watts_of(supply: Supply) -> float | None:
    """Returns the power in watts from POWER_NOW (µW), else from CURRENT_NOW (µA) × VOLTAGE_NOW (µV), else None."""
    power = supply.number("POWER_NOW")
    if power is not None:
        return abs(power) * 1e-6
    current, voltage = supply.number("CURRENT_NOW"), supply.number("VOLTAGE_NOW")
    if current is None or voltage is None:
        return None
    return abs(current) * 1e-6 * voltage * 1e-6


def require_discharging(system: System, supplies: list[Supply]) -> None:
    """Raises MeterError unless the machine runs only on its batteries. Of several batteries, only one discharges at a time."""
    charger = external_power(system)
    if charger:
        raise MeterError(f"{charger} supplies power, and a battery's figures show the load only while unplugged; unplug the charger")
    charging = [s for s in supplies if s.status == "Charging"]
    if charging or not any(s.status == "Discharging" for s in supplies):
        statuses = ", ".join(f"{s.name} is {s.status}" for s in charging or supplies)
        raise MeterError(f"{statuses}, but only a discharging battery shows the energy used; unplug the charger")


# A bad state invalidates the measurement around it. An unknown state is not assumed to be good: `warnings` mentions it.

# Bits 0 to 3 of `vcgencmd get_throttled`: undervoltage, capped clock, throttled, soft temperature limit. Bits 16 to 19: the same happened
# at some time since the board started.
THROTTLED_NOW, THROTTLED_EVER = 0xF, 0xF0000
HEAT_NOW = 0xE
CHARGE_LIMITS = (30, 95)  # percent: below this range the voltage sags, above it charging circuits interfere
HOTTEST = 120_000  # thousandths of a degree; some thermal zones report no temperature
POLICIES = "sys/devices/system/cpu/cpufreq/policy*"
TEMPERATURES = "sys/class/thermal/thermal_zone*/temp"
# Everything that `read_state` reads, so that a snapshot of a remote device can include it.
STATE_FILES = (
    *SUPPLY_FILES,
    *files_below(POLICIES, "scaling_max_freq scaling_cur_freq scaling_governor"),
    *files_below(COOLING, "type cur_state"),
    *files_below("proc", "device-tree/model cpuinfo meminfo"),
    COUNTERS,
    f"{MICROCODE}/version",
    TEMPERATURES,
)
STATE_COMMANDS = (
    ("dumpsys", "battery"),
    ("dumpsys", "thermalservice"),
    *((command, "get_throttled") for command in VCGENCMD),
)


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """A snapshot of a machine's state.

    Unknown values are None; `unknown` lists, with reasons, values that should be known on this machine. Frequencies are in kHz, temperature
    in °C, swap in bytes. `clock_mhz` is that of the fastest processor. `thermal_status` is Android's, 0 to 6. `throttled`, `throttle_count`
    and `cooling` are those of `Throttling`.
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
        """Whether the machine slows down because of heat, or will soon."""
        firmware = self.throttled is not None and bool(self.throttled & HEAT_NOW)
        return firmware or bool(self.cooling) or (self.thermal_status or 0) >= LIGHT


def read_state(system: System) -> DeviceState:
    """Returns the current state. It takes a few file reads, and one command on a Raspberry Pi or two on Android (about 0.1 s)."""
    phone = read_phone(system) if system.is_android else PhoneState()
    supplies, charger, denied = _power(system)
    policies = system.paths(POLICIES)
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
    """A reason not to measure."""

    code: Literal["throttled", "heat", "charger", "charge"]
    sentence: str


def refusals(state: DeviceState, *, at_battery: bool) -> list[Refusal]:
    """Returns reasons not to measure in this state. `at_battery` says that energy is read from the device's own battery."""
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
    """Returns remarks about this state for readers of the figures."""
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
    """Returns sentences that say how the machine throttled in this state."""
    sentences = []
    if state.throttled is not None and state.throttled & THROTTLED_NOW:
        sentences.append(_board_throttled(state.throttled))
    if state.cooling:
        sentences.append(f"the processor throttled ({', '.join(state.cooling)})")
    if (state.thermal_status or 0) >= MODERATE:
        sentences.append(f"Android throttled because of heat (thermal status {thermal_name(state.thermal_status)})")
    return sentences


def changes(before: DeviceState, after: DeviceState) -> list[str]:
    """Returns the changes between two snapshots that invalidate the run between them."""
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
    """Returns what invalidates the run between two snapshots: throttling in either, or a change from one to the other."""
    return list(dict.fromkeys([*throttling(before), *throttling(after), *changes(before, after)]))


def _board_throttled(bits: int) -> str:
    return f"the board throttled (get_throttled {bits:#x})"


def _power(system: System) -> tuple[list[Supply], str | None, str]:
    """Returns the batteries, the charger, and why they are unknown, which is empty if they are known."""
    try:
        return batteries(system), external_power(system), ""
    except PermissionError:
        return [], None, "charge and charger (permission denied below /sys/class/power_supply)"


def _swap_used(system: System) -> int | None:
    sizes = dict(re.findall(r"^(SwapTotal|SwapFree):\s+(\d{1,18}) kB", system.text_or("proc/meminfo"), re.MULTILINE))
    return (int(sizes["SwapTotal"]) - int(sizes["SwapFree"])) * 1024 if len(sizes) == 2 else None


def _temperature(system: System) -> float | None:
    texts = [system.text_or(p) for p in system.paths(TEMPERATURES)]
    degrees = [int(t) for t in texts if re.fullmatch(r"\d{4,6}", t) and int(t) <= HOTTEST]
    return max(degrees) / 1000 if degrees else None


def _clock_mhz(system: System, policies: list[str]) -> float | None:
    khz = [clock for p in policies if (clock := parse_integer(system.text_or(f"{p}/scaling_cur_freq"))) is not None]
    if khz:
        return max(khz) / 1000
    megahertz = re.findall(r"^cpu MHz\s*:\s*(\d{1,6}(?:\.\d{1,6})?)$", system.text_or("proc/cpuinfo"), re.MULTILINE)
    return max(map(float, megahertz), default=None)
