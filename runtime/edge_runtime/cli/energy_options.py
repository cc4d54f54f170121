"""The command-line options about energy, and what a run took. For commands: it looks for meters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from edge_devices.command_line import option_group
from edge_devices.energy.live import EnergyWatch, RunEnergy, SharedWatch
from edge_devices.energy.virtual_meters import VIRTUAL, requested_meter
from edge_devices.machine.system import System
from edge_devices.meters.base import Meter
from edge_devices.meters.search import find_meters
from edge_runtime.calibration.first_use import PowerSource
from edge_runtime.calibration.power_probe import PowerProbe
from edge_runtime.config.schema import OBJECTIVES
from edge_runtime.drafting.phase_power import PhasePower, read_phase_power


@dataclass(frozen=True, kw_only=True)
class EnergyValues:
    """What was asked for, and the meter that is there; `power` is what the objective energy weighs phases by, None: nothing is known."""

    system: System
    meter: Meter | None
    objective: str | None
    power: PhasePower | PowerSource | None
    explain: bool

    def watch(self) -> EnergyWatch:
        """Returns a watch over one run."""
        return EnergyWatch(self.system, self.meter)

    def shared_watch(self) -> SharedWatch | None:
        """Returns a watch over several requests at once; None without a meter."""
        return SharedWatch(self.system, self.meter) if self.meter else None


energy_options = option_group(
    click.option(
        "--meter",
        metavar="NAME",
        help=f"Energy meter of edge-devices meters to read, or {VIRTUAL}.  [default: the best usable one, if there is any]",
    ),
    click.option(
        "--objective",
        type=click.Choice(OBJECTIVES),
        help="What --policy profit drafts for: most tokens per second, or fewest joules per token.  [default: the configuration's]",
    ),
    click.option(
        "--phase-power",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="FILE",
        help="Watts of draft, verify and plain as JSON, for --objective energy.  [default: measured with the meter, once]",
    ),
    click.option(
        "--explain",
        is_flag=True,
        help="Say a line about each round: what was planned, drafted and accepted, tokens expected and emitted, the cost expected, ms"
        " taken, the rate expected over plain decoding's, and how sure the drafter was. The text comes after the lines.",
    ),
)


def energy_values(values: dict[str, Any], notify: Callable[[str], None], *, policy: str | None, draft_length: int | None) -> EnergyValues:
    """Takes the options' values out of all the command's, and looks for the meter.

    A usage error for an objective beside another way to choose draft lengths; MeterError if the named meter cannot be used.
    """
    name, objective, file = values.pop("meter"), values.pop("objective"), values.pop("phase_power")
    if objective == "energy" and (policy not in (None, "profit") or draft_length is not None):
        raise click.UsageError("--objective energy is for the policy profit, which chooses draft lengths itself; leave the others out")
    if file is not None and objective == "time":
        raise click.UsageError("--phase-power is for --objective energy; leave one of them out")
    system = System()
    meter = requested_meter(system, find_meters(system), name)
    power: PhasePower | PowerSource | None = None
    if file is not None:
        power = read_phase_power(file)
    elif meter is not None and not meter.facts.is_estimate:
        power = PowerProbe(system=system, meter=meter, notify=notify)
    return EnergyValues(system=system, meter=meter, objective=objective, power=power, explain=values.pop("explain"))


def energy_record(energy: RunEnergy) -> dict[str, Any]:
    """What a run's JSON says of its energy: null with the reason where there is no figure per token."""
    if energy.joules_per_token is None:
        return {"energy": None, "energy_reason": energy.sentence()}
    return {"energy": energy.to_json()}
