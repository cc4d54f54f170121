"""Meters that no search finds, since they are made from what a person says: an estimate, a recording, and one that writes its own table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edge_devices.energy.estimate import EstimateMeter
from edge_devices.energy.replay import ReplayMeter
from edge_devices.energy.run_log import read_log
from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters.base import Finding, Kind, Meter, MeterFacts, Scope
from edge_devices.meters.search import choose_meter

ESTIMATE, REPLAY, EXTERNAL = "estimate", "replay", "external"
MADE = "estimate:IDLE,CORE (watts: a model, no measurement), replay:RUN.jsonl (a recording)"


class AwaitedMeter:
    """A meter in the supply line, whose table comes after the run: it reads nothing. What it does is assumed until then: a new value a second."""

    facts = MeterFacts(
        name=EXTERNAL,
        kind=Kind.SAMPLER,
        scope=Scope.EXTERNAL,
        source="a table to come",
        refresh_s=1.0,
        resolution=0.001,
        poll_s=1.0,
        needs="a meter in the supply line that writes a table",
        systematic="see the meter's data sheet",
    )

    def read(self) -> None:
        """Returns nothing."""


def asked_meter(system: System, findings: Sequence[Finding], name: str | None) -> Meter | None:
    """Returns the meter to take: of those found, else made from its name; None when none is named and none is usable. Raises MeterError."""
    made = None if any(finding.name == name for finding in findings) else made_meter(system, name)
    return made or choose_meter(findings, name)


def made_meter(system: System, name: str | None) -> Meter | None:
    """Returns the meter of `estimate:IDLE,CORE` or `replay:FILE`; None for every other name. Raises MeterError for values that cannot be."""
    kind, _, value = (name or "").partition(":")
    if kind == ESTIMATE:
        try:
            idle_watts, core_watts = map(float, value.split(","))
        except ValueError:
            raise MeterError(f"{name!r} is no power model; write estimate:IDLE,CORE with watts, such as estimate:2.5,4.") from None
        return EstimateMeter(system, idle_watts=idle_watts, core_watts=core_watts)
    if kind == REPLAY and value:
        return ReplayMeter(system, read_log(Path(value)).trace)
    return None
