"""Options for energy, the meter they select, and the energy record of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from edge_devices.command_line import option_group, take
from edge_devices.energy.live import EnergyWatch, RunEnergy, SharedWatch
from edge_devices.energy.virtual_meters import ESTIMATE, VIRTUAL, requested_meter, virtual_meter
from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters.base import Meter
from edge_devices.meters.search import find_meters, no_meter_reason
from edge_devices.waiting import terminal_wait
from edge_runtime.calibration.placement import PowerSource
from edge_runtime.calibration.power_probe import PowerProbe
from edge_runtime.config.schema import OBJECTIVES
from edge_runtime.drafting.phase_power import PhasePower, read_phase_power


class PercentType(click.ParamType[float]):
    """A percentage such as 10%; its value is the share, 0.1."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Returns the share; a usage error for anything but 0 to 1000 percent."""
        try:
            share = float(str(value).strip().removesuffix("%")) / 100
        except ValueError:
            share = -1.0
        if not 0 <= share <= 10:
            self.fail(f"{value!r} is no percentage from 0% to 1000%; write such as 10%", param, ctx)
        return share


@dataclass(frozen=True, kw_only=True)
class EnergyValues:
    """The selected meter and options. `power` is the watts per phase for the objective energy; None if unknown."""

    system: System
    meter: Meter | None
    objective: str | None
    slowdown: float | None
    power: PhasePower | PowerSource | None
    explain: bool
    reason: str = ""  # why there is no meter

    def or_estimate(self) -> EnergyValues:
        """Returns these values with the power model of the device's profile where there is no meter; without one, the reason says why."""
        if self.meter is not None:
            return self
        try:
            return replace(self, meter=virtual_meter(self.system, ESTIMATE))
        except MeterError as error:
            return replace(self, reason=f"{self.reason}, and no estimate: {error} (--meter)")

    def watch(self) -> EnergyWatch:
        """Returns the energy measurement of one run."""
        return EnergyWatch(self.system, self.meter, self.reason)

    def shared_watch(self) -> SharedWatch:
        """Returns the energy measurement of concurrent requests."""
        return SharedWatch(self.system, self.meter, self.reason)


def unwatched() -> EnergyWatch:
    """Returns an energy measurement without a meter."""
    return EnergyWatch(System(), None)


energy_options = option_group(
    click.option(
        "--meter",
        metavar="NAME",
        help=f"Energy meter to read: a name from edge-devices meters, or {VIRTUAL}.  [default: the best usable meter, if any]",
    ),
    click.option(
        "--objective",
        type=click.Choice(OBJECTIVES),
        help="What --policy profit optimizes: tokens per second, or joules per token.  [default: from the configuration]",
    ),
    click.option(
        "--slowdown",
        type=PercentType(),
        metavar="PERCENT",
        help="For --objective energy: the fewest joules that cost at most so much more time per token, such as 10%.  [default: any]",
    ),
    click.option(
        "--phase-power",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="FILE",
        help="For --objective energy: JSON file with the watts of draft, verify and plain.  [default: measured on first use]",
    ),
    click.option(
        "--explain",
        is_flag=True,
        help="Print one line per round: decision, expected and emitted tokens, cost, time, gain and confidence. The text follows them.",
    ),
    panel="Energy",
)


@dataclass(frozen=True, kw_only=True)
class _Options:
    meter: str | None
    objective: str | None
    slowdown: float | None
    phase_power: Path | None
    explain: bool


def energy_values(values: dict[str, Any], notify: Callable[[str], None], *, policy: str | None, draft_length: int | None) -> EnergyValues:
    """Takes the options' values and opens the meter.

    Raises a usage error for an objective together with another choice of draft lengths, MeterError if the named meter cannot be used.
    """
    taken = take(values, _Options)
    if taken.objective == "energy" and (policy not in (None, "profit") or draft_length is not None):
        raise click.UsageError("--objective energy needs --policy profit, which chooses draft lengths itself; leave the others out")
    if taken.phase_power is not None and taken.objective == "time":
        raise click.UsageError("--phase-power is for --objective energy; leave one of them out")
    if taken.slowdown is not None and taken.objective == "time":
        raise click.UsageError("--slowdown is for --objective energy; leave one of them out")
    system = System()
    findings = find_meters(system)
    meter = requested_meter(system, findings, taken.meter)
    power: PhasePower | PowerSource | None = None
    if taken.phase_power is not None:
        power = read_phase_power(taken.phase_power)
    elif meter is not None and not meter.facts.is_estimate:
        power = PowerProbe(system=system, meter=meter, notify=notify, waiting=terminal_wait)
    return EnergyValues(
        system=system,
        meter=meter,
        objective=taken.objective,
        slowdown=taken.slowdown,
        power=power,
        explain=taken.explain,
        reason="" if meter else no_meter_reason(findings),
    )


def energy_record(energy: RunEnergy) -> dict[str, Any]:
    """Returns the energy part of a run's JSON: null and the reason if there is no figure per token."""
    if energy.joules_per_token is None:
        return {"energy": None, "energy_reason": energy.sentence()}
    return {"energy": energy.to_json()}
