"""Mean power that Linux' hwmon reports of whole units: graphics boards, APUs, servers, Macs, and power supplies with a USB port.

Files (Documentation/gpu/amdgpu/thermal.rst and Documentation/hwmon/acpi_power_meter.rst of Linux): power1_average or power1_input in µW,
power1_average_interval in ms. amdgpu's figure is the SoC's on an APU, processor included, which alone has a northbridge voltage `vddnb`.
Of other chips the figures with these labels are read: macsmc_hwmon (Linux on Apple silicon), zenpower (AMD's SVI2 telemetry, two rails a
socket), corsairpsu (power supplies of the HXi and RMi series: what they put out to the whole machine).
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
LABELLED = {
    "macsmc_hwmon": (Scope.PLATFORM, ("Total System Power",)),
    "zenpower": (Scope.PACKAGE, tuple(f"{socket}SVI2_P_{rail}" for socket in ("", "cpu0 ", "cpu1 ") for rail in ("Core", "SoC"))),
    "corsairpsu": (Scope.EXTERNAL, ("power total",)),
}
LABELLED_MS = 1000
NOTES = {
    Scope.PACKAGE: "the whole chip, processor and graphics",
    Scope.EXTERNAL: "the power supply's output to the whole machine",
    Scope.GPU: "one graphics board alone",
    Scope.PLATFORM: "the machine's input as its firmware reports it",
}


def average_meter(system: System, paths: tuple[str, ...], name: str, scope: Scope, interval_ms: int) -> SumMeter:
    """Returns the meter of one unit's mean power, the sum of the files, in watts."""
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
        notes=(NOTES[scope],),
    )

    def read() -> list[tuple[str, float]]:
        parts: list[tuple[str, float]] = [(path.rpartition("/")[2], required_number(system, path, ASLEEP)) for path in paths]
        for name, microwatts in parts:
            if microwatts < 0:
                raise MeterError(f"{name} of {facts.name} holds no power; {ASLEEP}")
        return parts

    return SumMeter(system, facts, read, scale=1e-6)


def find(system: System) -> list[Finding]:
    """Returns one finding per unit; an empty list on other machines."""
    findings: list[Finding] = []
    for folder in system.paths(PATTERN):
        chip = system.text_or(f"{folder}/name")
        if chip in LABELLED and (paths := _labelled(system, folder, LABELLED[chip][1])):
            count = sum(finding.name.startswith(f"hwmon:{chip}:") for finding in findings)
            findings.append(tried(average_meter(system, paths, f"hwmon:{chip}:{count + 1}", LABELLED[chip][0], LABELLED_MS)))
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
        findings.append(tried(average_meter(system, (path,), name, scope, interval_ms)))
    return findings


def _labelled(system: System, folder: str, labels: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the files of power with one of these labels."""
    places = [path.removesuffix("_label") for path in system.paths(f"{folder}/power*_label") if system.text_or(path) in labels]
    return tuple(f"{place}_input" for place in places if system.exists(f"{place}_input"))
