"""Mean power that Linux' hwmon reports of whole units: amdgpu of APUs and graphics boards, and ACPI power meters of servers.

Files (Documentation/gpu/amdgpu/thermal.rst and Documentation/hwmon/acpi_power_meter.rst of Linux): power1_average or power1_input in µW,
power1_average_interval in ms. amdgpu's figure is the SoC's on an APU, processor included, which alone has a northbridge voltage `vddnb`.
"""

from __future__ import annotations

from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters.base import Finding, Kind, MeterFacts, Scope, SumMeter, required_number, tried

NAME = "hwmon:average"
ASLEEP = "the unit may be asleep"
PATTERN = "sys/class/hwmon/hwmon*"
FILES = ("power1_average", "power1_input")
AMDGPU, ACPI = "amdgpu", "power_meter"
DEFAULT_INTERVAL_MS = {AMDGPU: 100, ACPI: 1000}
NOTES = {
    Scope.PACKAGE: "an APU's whole chip, processor and graphics",
    Scope.GPU: "one graphics board alone",
    Scope.PLATFORM: "the machine's input as its firmware reports it",
}


def average_meter(system: System, path: str, name: str, scope: Scope, interval_ms: int) -> SumMeter:
    """Returns the meter of one unit's mean power, in watts."""
    facts = MeterFacts(
        name=name,
        kind=Kind.SAMPLER,
        scope=scope,
        source=f"/{path}",
        refresh_s=interval_ms / 1000,
        resolution=0.01,
        poll_s=max(interval_ms / 1000, 0.1),
        lag_s=interval_ms / 1000,
        systematic="the firmware's own scale",
        notes=(NOTES[scope],),
    )

    def read() -> list[tuple[str, float]]:
        microwatts = required_number(system, path, ASLEEP)
        if microwatts < 0:
            raise MeterError(f"/{path} holds no power; {ASLEEP}")
        return [("microwatts", microwatts)]

    return SumMeter(system, facts, read, scale=1e-6)


def find(system: System) -> list[Finding]:
    """Returns one finding per unit; an empty list on other machines."""
    findings: list[Finding] = []
    for folder in system.paths(PATTERN):
        chip = system.text_or(f"{folder}/name")
        path = next((f"{folder}/{file}" for file in FILES if system.exists(f"{folder}/{file}")), None)
        if chip not in (AMDGPU, ACPI) or path is None:
            continue
        apu = system.text_or(f"{folder}/in1_label") == "vddnb"
        scope = Scope.PLATFORM if chip == ACPI else Scope.PACKAGE if apu else Scope.GPU
        name = f"hwmon:{chip}:{sum(finding.name.startswith(f'hwmon:{chip}:') for finding in findings) + 1}"
        try:
            interval = system.number(f"{folder}/power1_average_interval")
        except PermissionError:
            interval = None
        interval_ms = interval if interval and 1 <= interval <= 60_000 else DEFAULT_INTERVAL_MS[chip]
        findings.append(tried(average_meter(system, path, name, scope, interval_ms)))
    return findings
