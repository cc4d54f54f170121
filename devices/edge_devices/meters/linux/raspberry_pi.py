"""Raspberry Pi 5: the supply chip's own converters, through `vcgencmd pmic_read_adc`.

Rails have a current line `NAME_A current(n)=..A` and a voltage line `NAME_V volt(m)=..V`; they pair by name, the numbers do not correspond.
The sum is not the board's input: converters lose some, and USB and PCIe loads are not sensed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from edge_devices.errors import MeterError
from edge_devices.machine.state import NOT_FOUND, VCGENCMD, VCGENCMD_REMEDY
from edge_devices.machine.system import System
from edge_devices.meters.base import Finding, Kind, MeterFacts, Scope, SumMeter, absent, present, usable

NAME = "raspberry-pi:pmic"
LINE = re.compile(r"^\s*(\w+)_([AV])\s+(?:current|volt)\(\d+\)=(-?\d+(?:\.\d+)?)[AV]\s*$", re.MULTILINE)


def parse_pmic(text: str) -> dict[str, float]:
    """Reads `vcgencmd pmic_read_adc`: rail -> watts, for rails that have both current and voltage."""
    amperes: dict[str, float] = {}
    volts: dict[str, float] = {}
    for name, unit, figure in LINE.findall(text):
        (amperes if unit == "A" else volts)[name] = float(figure)
    return {name: amperes[name] * volts[name] for name in amperes if name in volts}


def pmic_meter(system: System, command: str) -> SumMeter:
    """Returns the meter of all sensed rails together, in watts. A read costs about 10 ms: a process and a mailbox call."""
    facts = MeterFacts(
        name=NAME,
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


def find(system: System) -> list[Finding]:
    """Returns the finding of the supply chip; an empty list on other machines."""
    model = system.text_or("proc/device-tree/model").rstrip("\0")
    if not model.startswith("Raspberry Pi"):
        return []
    if not model.startswith(("Raspberry Pi 5", "Raspberry Pi 500", "Raspberry Pi Compute Module 5")):
        return [
            absent(NAME, f"{model} senses no current; use a meter in the supply line (an INA2xx through hwmon, or one that writes a table)")
        ]
    for command in VCGENCMD:
        done = system.run([command, "pmic_read_adc"])
        if done.code == NOT_FOUND:
            continue
        if parse_pmic(done.text):
            return [usable(pmic_meter(system, command))]
        return [present(NAME, done.first_line, VCGENCMD_REMEDY)]
    return [present(NAME, "vcgencmd is not installed", "install Raspberry Pi OS's raspi-utils")]
