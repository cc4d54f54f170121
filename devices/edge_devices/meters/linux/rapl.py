"""RAPL counters of Intel and AMD processors through Linux powercap.

Facts: Documentation/power/powercap/powercap.rst and drivers/powercap/intel_rapl_common.c of Linux. Zones are identified by name, never by
number; the control type intel-rapl-mmio repeats package-0 and is skipped; core and uncore are parts of the package and not added.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_devices.machine.system import System
from edge_devices.meters.base import Finding, Kind, MeterFacts, Scope, SumMeter, absent, present, required_number, tried

NAME = "rapl"
POWERCAP = "sys/class/powercap"
REMEDY = (
    "energy_uj has been readable by root only since Linux 5.10 (CVE-2020-8694); until the next start: "
    "sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj /sys/class/powercap/intel-rapl:*:*/energy_uj"
)
SCOPES = {"package": Scope.PACKAGE, "dram": Scope.DRAM, "psys": Scope.PLATFORM}
PSYS_PROBE_S = 0.05
MOST_WATTS = 1000.0  # of one zone; the largest sockets take half of it


def zones_meter(system: System, scope: Scope, folders: Sequence[str]) -> SumMeter:
    """Returns the meter of all zones of one kind (one package per socket), in joules; `folders`: of the zones, below the root."""
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
        missing, denied = "the powercap driver may have been unloaded", f"is no longer readable; {REMEDY}"
        return [(folder, required_number(system, f"{folder}/energy_uj", missing, denied)) for folder in folders]

    spans = {folder: system.number(f"{folder}/max_energy_range_uj") or None for folder in folders}
    return SumMeter(system, facts, read, scale=1e-6, spans=spans, most_watts=MOST_WATTS)


def find(system: System) -> list[Finding]:
    """Returns one finding per kind of zone (package, dram, psys)."""
    groups: dict[str, list[str]] = {}
    for folder in system.paths(f"{POWERCAP}/intel-rapl:*"):
        kind = system.text_or(f"{folder}/name").partition("-")[0]
        if kind in SCOPES:
            groups.setdefault(kind, []).append(folder)
    if not groups:
        return [absent(NAME, f"no intel-rapl zones below /{POWERCAP} (virtual machines and containers have none)")]
    findings = [tried(zones_meter(system, SCOPES[kind], folders), ("denied to this user", REMEDY)) for kind, folders in groups.items()]
    return _without_broken_psys(system, findings)


def _without_broken_psys(system: System, findings: list[Finding]) -> list[Finding]:
    """A platform contains its package: where psys counts less, it is not wired or not scaled."""
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
