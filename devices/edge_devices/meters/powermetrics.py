"""Macs: the `powermetrics` command. It estimates the power of processor, graphics and neural engine, without the display.

Apple silicon prints `CPU Power: 947 mW` and so on, and a sum (`Package Power`, later `Combined Power (CPU + GPU + ANE)`) that some
versions lack; Intel Macs `Intel energy model derived package power (CPUs+GT+SA): 2.48W`. Numbers follow the user's region: 1.473 or 1,473.
"""

from __future__ import annotations

import re

from edge_devices.errors import MeterError
from edge_devices.machine.system import CommandResult, System
from edge_devices.meters.base import Finding, Kind, MeterFacts, Scope, SumMeter, absent, present, usable

NAME = "apple:powermetrics"
LINE = re.compile(
    r"^\s*(CPU|GPU|ANE|DRAM|Package|Combined|Intel energy model derived package)(?: [Pp]ower)(?: \([\w +]+\))?:"
    r"\s*(\d[\d.,'\u00a0\u202f\u2019]{0,17})\s*(m?W)\s*$",
    re.MULTILINE,
)
INTEL = "Intel energy model derived package"
PERIOD_S = 1.0
REMEDY = "powermetrics needs root: run edge-bench and edge-devices with sudo"


def parse_powermetrics(text: str) -> dict[str, float]:
    """Reads the text of one sample: part -> watts."""
    return {part: _number(figure, unit) for part, figure, unit in LINE.findall(text)}


def _number(text: str, unit: str) -> float:
    """Returns the watts in a number of any region: the last point or comma begins decimals, but groups of three in whole milliwatts."""
    whole, rest = re.fullmatch(r"(.*?)(?:[.,](\d*))?", text).groups("")  # type: ignore[union-attr]
    digits = re.sub(r"\D", "", whole)
    grouped = unit == "mW" and len(rest) == 3 and digits.strip("0")
    return float(f"{digits}{rest}" if grouped else f"{digits or 0}.{rest or 0}") * (1e-3 if unit == "mW" else 1.0)


def package_watts(parts: dict[str, float]) -> float | None:
    """Returns the package's power: as printed, else the sum of its parts; None where nothing is printed."""
    for total in ("Package", "Combined", INTEL):
        if total in parts:
            return parts[total]
    return sum(parts.values()) if parts else None


def package_meter(system: System) -> SumMeter:
    """Returns the meter of the mean package power over the second that a read takes, in watts."""
    facts = MeterFacts(
        name=NAME,
        kind=Kind.SAMPLER,
        scope=Scope.PACKAGE,
        source="powermetrics --samplers cpu_power",
        refresh_s=PERIOD_S,
        resolution=0.001,
        poll_s=PERIOD_S,
        lag_s=PERIOD_S,
        needs="root",
        systematic="Apple's own model, not a sensor at the battery",
        notes=("without the display; without memory on newer systems",),
    )

    def read() -> list[tuple[str, float]]:
        done = _run(system)
        watts = package_watts(parse_powermetrics(done.text))
        if watts is None:
            raise MeterError(f"powermetrics printed no power: {done.first_line}; {REMEDY}")
        return [("package", watts)]

    return SumMeter(system, facts, read)


def find(system: System) -> list[Finding]:
    """Returns the finding of powermetrics; an empty list on other machines."""
    if system.platform != "darwin":
        return []
    done = _run(system)
    if parse_powermetrics(done.text):
        return [usable(package_meter(system))]
    if done.code == 127:
        return [absent(NAME, "no powermetrics command on this Mac")]
    if done.code == 0:
        return [present(NAME, "powermetrics prints no power that this version reads", "report its output: powermetrics -n 1 -i 1000")]
    return [present(NAME, "denied to this user", REMEDY)]


def _run(system: System) -> CommandResult:
    return system.run(["powermetrics", "-n", "1", "-i", f"{PERIOD_S * 1000:.0f}", "--samplers", "cpu_power"])
