"""Power monitor chips of Texas Instruments behind Linux hwmon: INA219/226/230/231/260, INA228/237/238, INA3221.

Files (Documentation/hwmon/ina2xx.rst, ina238.rst, ina3221.rst of Linux): energy1_input µJ where the chip counts, power1_input µW, in1_input
mV with curr1_input mA; INA3221 has three channels and no power file. Chips are identified by `name`: their numbers change at each boot.
Boards with many INA226 name each (`ina226_u76`), or number equal names in the kernel's order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters.base import Finding, Kind, MeterFacts, Scope, SumMeter, absent, required_product, tried

NAME = "hwmon"
REVERSED = ":reversed"
REVERSED_NOTE = "its current is negative, the load's if the shunt is wired that way round, a charging battery's if not: read by name only"
PATTERN = "sys/class/hwmon/hwmon*"
CHIPS = ("ina219", "ina220", "ina226", "ina230", "ina231", "ina260", "ina228", "ina237", "ina238", "ina700", "ina780", "sq52206", "ina3221")
# A Jetson's own rails: jetson.py reads those.
BOARD_LABELS = (
    *("VDD_IN", "VDD_CPU_GPU_CV", "VDD_SOC", "POM_5V_IN", "VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0", "VDDQ_VDD2_1V8AO"),
    *("VDD_GPU", "VDD_CPU_SOC_MSS", "VIN"),
)


@dataclass(frozen=True, kw_only=True)
class Channel:
    """One channel of a chip: the files that are read, and how they combine."""

    chip: str
    label: str
    kind: Kind
    paths: tuple[str, ...]
    current: str  # the file whose sign is the direction; power files have none


def channels(system: System) -> list[Channel]:
    """Returns every channel of every chip, the best file first: energy, power, then voltage × current."""
    listed = []
    for folder in system.paths(PATTERN):
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
    """Returns a channel whose label none of the earlier ones of such a chip has."""
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
    """Returns the meter of one channel: joules of a chip that counts, else watts. Of two files: mV × mA = µW.

    Its current keeps the direction that it has now: a line that charges and is then under load would read as load both times.
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
        return False  # the reading says so


def find(system: System) -> list[Finding]:
    """Returns one finding per channel."""
    findings = [tried(channel_meter(system, channel)) for channel in channels(system)]
    return findings or [absent(NAME, "no INA2xx or INA3221 chip below /sys/class/hwmon")]
