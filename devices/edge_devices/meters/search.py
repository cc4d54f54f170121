"""Finds the meters of a machine in all sources, and chooses the default one."""

from __future__ import annotations

from collections.abc import Sequence

from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters import android, apple, linux, nvml, windows_emi
from edge_devices.meters.base import Finding, Meter, MeterState, Preference, Scope, present

# Sorted by preference. Among sources of equal preference, those that come first here, and first in their module, are preferred.
_LISTED = (*linux.SOURCES, *windows_emi.SOURCES, *android.SOURCES, *apple.SOURCES, *nvml.SOURCES)
SOURCES = tuple(sorted(_LISTED, key=lambda source: source.preference))
BATTERY_METERS = tuple(source.name for source in SOURCES if source.preference is Preference.BATTERY)
NO_METER = "no energy meter on this machine"


def find_meters(system: System) -> list[Finding]:
    """Returns the meters of this machine, usable or not. If a source raises, it is reported as present with the reason."""
    findings: list[Finding] = []
    for source in SOURCES:
        try:
            findings += source.find(system)
        except (MeterError, OSError) as error:
            findings.append(present(source.name, str(error)))
    return findings


def choose_meter(findings: Sequence[Finding], name: str | None = None) -> Meter | None:
    """Returns the named meter, or the first usable one; None if there is none. Raises MeterError if the named one is not usable.

    Graphics boards are chosen only by name, because bundles run on the processor, and the joules of an idle board say nothing about that.
    Lines with a negative current are chosen only by name too, because a battery may be charging there.
    """
    usable = [f for f in findings if f.meter is not None]
    if name is None:
        return next((f.meter for f in usable if not _is_gpu(f) and not f.name.endswith(linux.REVERSED)), None)
    for finding in findings:
        if finding.name == name and finding.meter is not None:
            return finding.meter
        if finding.name == name:
            raise MeterError(f"the meter {name} is {finding.state}: {finding.reason}" + (f"; {finding.remedy}" if finding.remedy else ""))
    known = ", ".join(f.name for f in usable) or "none"
    raise MeterError(f"no meter {name!r} on this machine, usable: {known}; `edge-devices meters` lists all")


def no_meter_reason(findings: Sequence[Finding]) -> str:
    """Returns why `choose_meter` chooses none: the meters that exist but cannot be used, with reasons, or that there are none."""
    reasons = [f"{f.name}: {f.reason}" + (f"; {f.remedy}" if f.remedy else "") for f in findings if f.state is MeterState.PRESENT]
    reasons += [f"{f.name} counts the graphics board alone, and is read with --meter {f.name}" for f in findings if _is_gpu(f)]
    reasons += [f"{f.name}: {linux.REVERSED_NOTE}" for f in findings if f.name.endswith(linux.REVERSED)]
    return f"{NO_METER} can be used ({'; '.join(reasons)})" if reasons else NO_METER


def _is_gpu(finding: Finding) -> bool:
    return finding.meter is not None and finding.meter.facts.scope is Scope.GPU
