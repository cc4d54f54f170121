"""Meters on Linux: Jetson, Raspberry Pi, INA chips, RAPL, mean power in hwmon, and laptop batteries.

Each kind has a section in this file, which ends with its `find` function. `SOURCES` at the end lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from edge_devices.errors import MeterError
from edge_devices.machine.state import (
    SUPPLIES,
    SUPPLY_FILES,
    VCGENCMD,
    VCGENCMD_REMEDY,
    Supply,
    batteries,
    require_discharging,
    watts_of,
)
from edge_devices.machine.system import NOT_FOUND, System, files_below
from edge_devices.meters.base import (
    Finding,
    Kind,
    MeterFacts,
    MeterSource,
    Preference,
    Scope,
    SumMeter,
    absent,
    present,
    required_number,
    required_product,
    tried,
    usable,
)

# NVIDIA Jetson: the module's INA3221 rails.
#
# Files: in{n}_label, in{n}_input (mV), curr{n}_input (mA) of the ina3221 driver; before JetPack 5 rail_name_{n} and in_power{n}_input (mW)
# under iio. VDD_IN feeds the other rails, so only the module's input is read. On Orin, the processor and the graphics share a rail. AGX
# Orin does not sense its input, so its three supplies are summed, without VDDQ_VDD2_1V8AO, which VIN_SYS_5V0 feeds. Thor's input, VIN, is
# sensed by an INA238.

JETSON = "jetson"
JETSON_HWMON = "sys/bus/i2c/drivers/ina3221*/*/hwmon/hwmon*"
JETSON_IIO = "sys/bus/i2c/drivers/ina3221x/*/iio:device*"
JETSON_INA238 = "sys/bus/i2c/drivers/ina238/*/hwmon/hwmon*"
JETSON_INPUTS = ("VDD_IN", "POM_5V_IN", "VIN")
FED_BY_OTHERS = ("VDDQ_VDD2_1V8AO",)
RAILS_ALONE = "the module's rails, not its input: reads lower than a meter in the supply line"
NOT_RAILS = ("NC", "sum of shunt voltages")


@dataclass(frozen=True, kw_only=True)
class Rail:
    """One rail. The product of its files' numbers times `scale` is watts."""

    label: str
    paths: tuple[str, ...]
    scale: float


def sensed_rails(system: System) -> list[Rail]:
    """Returns the rails that this module senses."""
    sensed = []
    for folder in system.paths(JETSON_HWMON):
        for n in range(1, 7):
            label = system.text_or(f"{folder}/in{n}_label")
            if label and label not in NOT_RAILS and system.exists(f"{folder}/curr{n}_input"):
                sensed.append(Rail(label=label, paths=(f"{folder}/in{n}_input", f"{folder}/curr{n}_input"), scale=1e-6))
    for folder in system.paths(JETSON_INA238) if sensed else ():  # without other rails, such a chip belongs to the meters of hwmon
        if system.exists(f"{folder}/power1_input"):
            sensed.append(Rail(label=system.text_or(f"{folder}/in1_label") or "VIN", paths=(f"{folder}/power1_input",), scale=1e-6))
    for folder in system.paths(JETSON_IIO):
        for n in range(3):
            label = system.text_or(f"{folder}/rail_name_{n}")
            if label and label not in NOT_RAILS:
                sensed.append(Rail(label=label, paths=(f"{folder}/in_power{n}_input",), scale=1e-3))
    return sensed


def module_meter(system: System, sensed: list[Rail]) -> SumMeter:
    """Returns the meter of the module's input, in watts, or of the sum of its rails if the board does not sense its input."""
    inputs = [r for r in sensed if r.label in JETSON_INPUTS]
    summed = inputs or [r for r in sensed if r.label not in FED_BY_OTHERS]
    facts = MeterFacts(
        name=JETSON,
        kind=Kind.SAMPLER,
        scope=Scope.MODULE if inputs else Scope.RAILS,
        source=", ".join(r.label for r in summed),
        refresh_s=0.1,
        resolution=0.001,
        poll_s=0.1,
        systematic="chip 0.1-0.5 %, and the shunts' tolerance",
        notes=() if inputs else (RAILS_ALONE,),
    )
    return SumMeter(system, facts, lambda: [(rail.label, rail.scale * required_product(system, rail.paths)) for rail in summed])


def find_jetson(system: System) -> list[Finding]:
    """Returns the finding of the module's sensors; an empty list on other machines."""
    sensed = sensed_rails(system)
    model = system.text_or("proc/device-tree/model")
    if not sensed:
        return [absent(JETSON, "no ina3221 rails on this Jetson")] if "Jetson" in model else []
    if not any(r.label in JETSON_INPUTS or "VDD" in r.label for r in sensed):
        return []
    return [tried(module_meter(system, sensed))]


# Raspberry Pi 5: the supply chip's measurements, read with `vcgencmd pmic_read_adc`.
#
# A rail has a current line `NAME_A current(n)=..A` and a voltage line `NAME_V volt(m)=..V`, which belong together by name, not by number.
# The sum is less than the board's input, because converters lose some power, and USB and PCIe loads are not sensed.

PMIC = "raspberry-pi:pmic"
PMIC_LINE = re.compile(r"^\s*(\w+)_([AV])\s+(?:current|volt)\(\d+\)=(-?\d+(?:\.\d+)?)[AV]\s*$", re.MULTILINE)


def parse_pmic(text: str) -> dict[str, float]:
    """Parses the output of `vcgencmd pmic_read_adc`. Returns watts by rail, for rails with both current and voltage."""
    amperes: dict[str, float] = {}
    volts: dict[str, float] = {}
    for name, unit, figure in PMIC_LINE.findall(text):
        (amperes if unit == "A" else volts)[name] = float(figure)
    return {name: amperes[name] * volts[name] for name in amperes if name in volts}


def pmic_meter(system: System, command: str) -> SumMeter:
    """Returns the meter of the sum of all sensed rails, in watts. A read takes about 10 ms, for a process and a mailbox call."""
    facts = MeterFacts(
        name=PMIC,
        kind=Kind.SAMPLER,
        scope=Scope.BOARD,
        source=f"{command} pmic_read_adc",
        refresh_s=0.15,
        resolution=0.001,
        poll_s=0.15,
        needs="membership in the group video",
        systematic="reads low: boards compared with a supply-line meter took about 1.13-1.15 × this + 0.6 W",
        notes=("USB and PCIe loads are invisible: use a meter in the supply line with HATs or NVMe",),
    )

    def read() -> Iterable[tuple[str, float]]:
        done = system.run([command, "pmic_read_adc"])
        rails = parse_pmic(done.text)
        if done.code != 0 or not rails:
            raise MeterError(f"`{command} pmic_read_adc` gave no rails: {done.first_line}; {VCGENCMD_REMEDY}")
        return rails.items()

    return SumMeter(system, facts, read)


def find_pmic(system: System) -> list[Finding]:
    """Returns the finding of the supply chip; an empty list on other machines."""
    model = system.text_or("proc/device-tree/model").rstrip("\0")
    if not model.startswith("Raspberry Pi"):
        return []
    if not model.startswith(("Raspberry Pi 5", "Raspberry Pi 500", "Raspberry Pi Compute Module 5")):
        return [
            absent(PMIC, f"{model} senses no current; use a meter in the supply line (an INA2xx through hwmon, or one that writes a table)")
        ]
    for command in VCGENCMD:
        done = system.run([command, "pmic_read_adc"])
        if done.code == NOT_FOUND:
            continue
        if parse_pmic(done.text):
            return [usable(pmic_meter(system, command))]
        return [present(PMIC, done.first_line, VCGENCMD_REMEDY)]
    return [present(PMIC, "vcgencmd is not installed", "install Raspberry Pi OS's raspi-utils")]


# Power monitor chips of Texas Instruments in Linux hwmon: INA219/226/230/231/260, INA228/237/238, INA3221.
#
# Files (Documentation/hwmon/ina2xx.rst, ina238.rst, ina3221.rst of Linux): energy1_input µJ where the chip counts, power1_input µW,
# in1_input mV with curr1_input mA. INA3221 has three channels and no power file. Chips are identified by `name`, because their numbers
# change at each boot. Boards with many INA226 give each a name (`ina226_u76`); chips with equal names are numbered in the kernel's order.

CHIP = "hwmon"
REVERSED = ":reversed"  # the end of the name of a channel with a negative current
REVERSED_NOTE = "its current is negative, the load's if the shunt is wired that way round, a charging battery's if not: read by name only"
HWMON = "sys/class/hwmon/hwmon*"
CHIPS = ("ina219", "ina220", "ina226", "ina230", "ina231", "ina260", "ina228", "ina237", "ina238", "ina700", "ina780", "sq52206", "ina3221")
# A Jetson's own rails, which the Jetson meter above reads.
BOARD_LABELS = (
    *("VDD_IN", "VDD_CPU_GPU_CV", "VDD_SOC", "POM_5V_IN", "VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0", "VDDQ_VDD2_1V8AO"),
    *("VDD_GPU", "VDD_CPU_SOC_MSS", "VIN"),
)


@dataclass(frozen=True, kw_only=True)
class Channel:
    """One channel of a chip, and the files whose product is its reading."""

    chip: str
    label: str
    kind: Kind
    paths: tuple[str, ...]
    current: str  # the file whose sign gives the direction, because power files have no sign


def channels(system: System) -> list[Channel]:
    """Returns every channel of every chip, with the best file that it has: energy, else power, else voltage × current."""
    listed = []
    for folder in system.paths(HWMON):
        chip = system.text_or(f"{folder}/name")
        if chip.partition("_")[0] not in CHIPS:
            continue
        current = f"{folder}/curr1_input"
        if system.exists(f"{folder}/energy1_input"):
            listed.append(Channel(chip=chip, label="1", kind=Kind.COUNTER, paths=(f"{folder}/energy1_input",), current=current))
        elif system.exists(f"{folder}/power1_input"):
            listed.append(Channel(chip=chip, label="1", kind=Kind.SAMPLER, paths=(f"{folder}/power1_input",), current=current))
        else:
            listed += _multiplied(system, folder, chip)
    return [_numbered(channel, listed[:i]) for i, channel in enumerate(listed)]


def _numbered(channel: Channel, earlier: list[Channel]) -> Channel:
    """Returns the channel, with a number added to its label if an earlier channel of such a chip has the same label."""
    same = sum((other.chip, other.label) == (channel.chip, channel.label) for other in earlier)
    return replace(channel, label=f"{channel.label}-{same + 1}") if same else channel


def _multiplied(system: System, folder: str, chip: str) -> list[Channel]:
    multiplied = []
    for n in (1, 2, 3):
        paths = (f"{folder}/in{n}_input", f"{folder}/curr{n}_input")
        label = system.text_or(f"{folder}/in{n}_label", str(n))
        if all(system.exists(p) for p in paths) and label != "NC" and label not in BOARD_LABELS:
            multiplied.append(Channel(chip=chip, label=label, kind=Kind.SAMPLER, paths=paths, current=paths[1]))
    return multiplied


def channel_meter(system: System, channel: Channel) -> SumMeter:
    """Returns the meter of one channel, in joules if the chip counts energy, else in watts. The product of two files is mV × mA = µW.

    If the current changes its direction later, that is an error, because charging would be counted as load too.
    """
    reversed_now = _is_negative(system, channel)
    interval_ms = system.number(f"{channel.paths[0].rpartition('/')[0]}/update_interval")
    refresh = interval_ms / 1000 if interval_ms and interval_ms > 0 else 0.1
    facts = MeterFacts(
        name=f"hwmon:{channel.chip}:{channel.label}{REVERSED if reversed_now else ''}",
        kind=channel.kind,
        scope=Scope.EXTERNAL,
        source=", ".join(f"/{p}" for p in channel.paths),
        refresh_s=refresh,
        resolution=1e-6 if channel.kind is Kind.COUNTER else 0.001,
        poll_s=max(refresh, 0.1),
        systematic="chip 0.1-0.5 %, and its shunt resistor's tolerance, often 1 %",
        notes=("covers the line the shunt sits in: check the wiring", *((REVERSED_NOTE,) if reversed_now else ())),
    )

    def read() -> list[tuple[str, float]]:
        if _is_negative(system, channel) != reversed_now and system.number(channel.current):
            raise MeterError(f"the current in /{channel.current} changed its direction: a battery in this line began or ended to charge")
        return [(channel.label, abs(required_product(system, channel.paths)))]

    return SumMeter(system, facts, read, scale=1e-6)


def _is_negative(system: System, channel: Channel) -> bool:
    try:
        return (system.number(channel.current) or 0) < 0
    except PermissionError:
        return False  # the reading itself will raise this error


def find_chips(system: System) -> list[Finding]:
    """Returns one finding per channel."""
    findings = [tried(channel_meter(system, channel)) for channel in channels(system)]
    return findings or [absent(CHIP, "no INA2xx or INA3221 chip below /sys/class/hwmon")]


# RAPL counters of Intel and AMD processors through Linux powercap.
#
# Facts: Documentation/power/powercap/powercap.rst and drivers/powercap/intel_rapl_common.c of Linux. Zones are identified by name, never by
# number. The control type intel-rapl-mmio repeats package-0, so it is skipped. Core and uncore are parts of the package, so they are not
# added.

RAPL = "rapl"
POWERCAP = "sys/class/powercap"
RAPL_REMEDY = (
    "energy_uj has been readable by root only since Linux 5.10 (CVE-2020-8694); until the next start: "
    "sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj /sys/class/powercap/intel-rapl:*:*/energy_uj"
)
RAPL_SCOPES = {"package": Scope.PACKAGE, "dram": Scope.DRAM, "psys": Scope.PLATFORM}
PSYS_PROBE_S = 0.05
MOST_WATTS = 1000.0  # no zone takes more; the largest sockets take half of this


def zones_meter(system: System, scope: Scope, folders: Sequence[str]) -> SumMeter:
    """Returns the meter of all zones of one kind (such as one package per socket), in joules. `folders` are theirs, below the root."""
    facts = MeterFacts(
        name=f"rapl:{scope}",
        kind=Kind.COUNTER,
        scope=scope,
        source=", ".join(f"/{f}/energy_uj" for f in folders),
        refresh_s=0.001,
        resolution=61e-6,
        poll_s=1.0,
        needs="read access to energy_uj",
        systematic="a few percent; modelled, not sensed, on processors before Haswell-EP",
        notes=("maker's own scale, not checked against the package",) if scope is Scope.PLATFORM else (),
    )

    def read() -> list[tuple[str, float]]:
        missing, denied = "the powercap driver may have been unloaded", f"is no longer readable; {RAPL_REMEDY}"
        return [(folder, required_number(system, f"{folder}/energy_uj", missing, denied)) for folder in folders]

    spans = {folder: system.number(f"{folder}/max_energy_range_uj") or None for folder in folders}
    return SumMeter(system, facts, read, scale=1e-6, spans=spans, most_watts=MOST_WATTS)


def find_rapl(system: System) -> list[Finding]:
    """Returns one finding per kind of zone (package, dram, psys)."""
    groups: dict[str, list[str]] = {}
    for folder in system.paths(f"{POWERCAP}/intel-rapl:*"):
        kind = system.text_or(f"{folder}/name").partition("-")[0]
        if kind in RAPL_SCOPES:
            groups.setdefault(kind, []).append(folder)
    if not groups:
        return [absent(RAPL, f"no intel-rapl zones below /{POWERCAP} (virtual machines and containers have none)")]
    denied = "denied to this user", RAPL_REMEDY
    findings = [tried(zones_meter(system, RAPL_SCOPES[kind], folders), denied) for kind, folders in groups.items()]
    return _without_broken_psys(system, findings)


def _without_broken_psys(system: System, findings: list[Finding]) -> list[Finding]:
    """Marks psys as not usable if it counts less than the package, which it contains. Then it is not wired or not scaled."""
    meters = {f.name: f.meter for f in findings if f.meter}
    package, psys = meters.get(f"rapl:{Scope.PACKAGE}"), meters.get(f"rapl:{Scope.PLATFORM}")
    if package is None or psys is None:
        return findings
    before = package.read(), psys.read()
    system.sleep(PSYS_PROBE_S)
    after = package.read(), psys.read()
    joules = [a.value - b.value for a, b in zip(after, before, strict=True) if a and b]
    if joules[1] >= joules[0]:
        return findings
    reason = f"counts {joules[1]:.3g} J while the package counts {joules[0]:.3g} J: not wired or not scaled on this board"
    return [present(f.name, reason) if f.meter is psys else f for f in findings]


# Mean power of whole units in hwmon: graphics boards, APUs, servers, Macs, and power supplies with a USB port.
#
# Files (Documentation/gpu/amdgpu/thermal.rst and Documentation/hwmon/acpi_power_meter.rst of Linux): power1_average or power1_input in µW,
# power1_average_interval in ms. On an APU, amdgpu's figure is that of the SoC with the processor; only an APU has a northbridge voltage
# `vddnb`. Of some other chips, the figures with certain labels are read: macsmc_hwmon (Linux on Apple silicon), zenpower (AMD's SVI2
# telemetry, two rails per socket), corsairpsu (power supplies of the HXi and RMi series, whose output feeds the whole machine).

AVERAGE = "hwmon:average"
ASLEEP = "the unit may be asleep"
AVERAGE_FILES = ("power1_average", "power1_input")
AMDGPU, ACPI = "amdgpu", "power_meter"
DEFAULT_INTERVAL_MS = {AMDGPU: 100, ACPI: 1000}
LABELLED = {
    "macsmc_hwmon": (Scope.PLATFORM, ("Total System Power",)),
    "zenpower": (Scope.PACKAGE, tuple(f"{socket}SVI2_P_{rail}" for socket in ("", "cpu0 ", "cpu1 ") for rail in ("Core", "SoC"))),
    "corsairpsu": (Scope.EXTERNAL, ("power total",)),
}
LABELLED_MS = 1000
AVERAGE_NOTES = {
    Scope.PACKAGE: "the whole chip, processor and graphics",
    Scope.EXTERNAL: "the power supply's output to the whole machine",
    Scope.GPU: "one graphics board alone",
    Scope.PLATFORM: "the machine's input as its firmware reports it",
}


def average_meter(system: System, paths: tuple[str, ...], name: str, scope: Scope, interval_ms: int) -> SumMeter:
    """Returns the meter of one unit's mean power, which is the sum of the files, in watts."""
    facts = MeterFacts(
        name=name,
        kind=Kind.SAMPLER,
        scope=scope,
        source=", ".join(f"/{path}" for path in paths),
        refresh_s=interval_ms / 1000,
        resolution=0.01,
        poll_s=max(interval_ms / 1000, 0.1),
        lag_s=interval_ms / 1000,
        systematic="the firmware's own scale",
        notes=(AVERAGE_NOTES[scope],),
    )

    def read() -> list[tuple[str, float]]:
        parts: list[tuple[str, float]] = [(path.rpartition("/")[2], required_number(system, path, ASLEEP)) for path in paths]
        for name, microwatts in parts:
            if microwatts < 0:
                raise MeterError(f"{name} of {facts.name} holds no power; {ASLEEP}")
        return parts

    return SumMeter(system, facts, read, scale=1e-6)


def find_averages(system: System) -> list[Finding]:
    """Returns one finding per unit; an empty list on other machines."""
    findings: list[Finding] = []
    for folder in system.paths(HWMON):
        chip = system.text_or(f"{folder}/name")
        name = f"hwmon:{chip}:{sum(finding.name.startswith(f'hwmon:{chip}:') for finding in findings) + 1}"
        if chip in LABELLED and (paths := _labelled(system, folder, LABELLED[chip][1])):
            findings.append(tried(average_meter(system, paths, name, LABELLED[chip][0], LABELLED_MS)))
        path = next((f"{folder}/{file}" for file in AVERAGE_FILES if system.exists(f"{folder}/{file}")), None)
        if chip not in (AMDGPU, ACPI) or path is None:
            continue
        apu = system.text_or(f"{folder}/in1_label") == "vddnb"
        scope = Scope.PLATFORM if chip == ACPI else Scope.PACKAGE if apu else Scope.GPU
        try:
            interval = system.number(f"{folder}/power1_average_interval")
        except PermissionError:
            interval = None
        interval_ms = interval if interval and 1 <= interval <= 60_000 else DEFAULT_INTERVAL_MS[chip]
        findings.append(tried(average_meter(system, (path,), name, scope, interval_ms)))
    return findings


def _labelled(system: System, folder: str, labels: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the power files with one of these labels."""
    places = [path.removesuffix("_label") for path in system.paths(f"{folder}/power*_label") if system.text_or(path) in labels]
    return tuple(f"{place}_input" for place in places if system.exists(f"{place}_input"))


# Laptop batteries: the power of all batteries together, while they discharge.

BATTERY = "battery"


def battery_meter(system: System, names: tuple[str, ...]) -> SumMeter:
    """Returns the meter of the batteries' total power, in watts."""
    facts = MeterFacts(
        name=BATTERY,
        kind=Kind.SAMPLER,
        scope=Scope.DEVICE,
        source=", ".join(f"/{SUPPLIES}/{n}" for n in names),
        # The ACPI driver caches a value for 1000 ms (cache_time). The embedded controller may be slower, which characterisation measures.
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
        return parts if any(watts for _, watts in parts) else None  # exactly 0 while discharging means that the gauge has no value yet

    return SumMeter(system, facts, read)


def watts_by_battery(supplies: list[Supply]) -> list[tuple[str, float]]:
    """Returns the watts of each battery, 0 if it is not discharging. Raises MeterError if one discharges but reports no power."""
    parts = []
    for supply in supplies:
        watts = watts_of(supply) if supply.status == "Discharging" else 0.0
        if watts is None:
            raise MeterError(f"{supply.name} reports neither power_now nor current_now with voltage_now; use a meter in the supply line")
        parts.append((supply.name, watts))
    return parts


def find_battery(system: System) -> list[Finding]:
    """Returns the finding of this machine's batteries."""
    if system.is_android:
        return []
    try:
        supplies = batteries(system)
    except PermissionError:
        return [present(BATTERY, f"/{SUPPLIES} is denied to this user", "run as a user that may read it")]
    if not supplies:
        return [absent(BATTERY, f"no battery that feeds this machine below /{SUPPLIES}")]
    try:
        require_discharging(system, supplies)
        watts_by_battery(supplies)
    except MeterError as error:
        return [present(BATTERY, str(error))]
    return [usable(battery_meter(system, tuple(s.name for s in supplies)))]


SOURCES = (
    MeterSource(
        name=JETSON,
        find=find_jetson,
        preference=Preference.BOARD,
        files=(
            "proc/device-tree/model",
            *files_below(JETSON_HWMON, "*_input *_label"),
            *files_below(JETSON_INA238, "*_input *_label"),
            *files_below(JETSON_IIO, "rail_name_* in_power*_input"),
        ),
    ),
    MeterSource(
        name=PMIC,
        find=find_pmic,
        preference=Preference.BOARD,
        files=("proc/device-tree/model",),
        commands=tuple((command, "pmic_read_adc") for command in VCGENCMD),
    ),
    MeterSource(
        name=CHIP, find=find_chips, preference=Preference.SUPPLY_LINE, files=files_below(HWMON, "name *_input *_label update_interval")
    ),
    MeterSource(
        name=RAPL,
        find=find_rapl,
        preference=Preference.COUNTER,
        files=files_below(f"{POWERCAP}/intel-rapl*", "name energy_uj max_energy_range_uj"),
    ),
    MeterSource(
        name=AVERAGE,
        find=find_averages,
        preference=Preference.MEAN,
        files=files_below(HWMON, "name *_input *_label *_average *_average_interval"),
    ),
    MeterSource(name=BATTERY, find=find_battery, preference=Preference.BATTERY, files=SUPPLY_FILES),
)
