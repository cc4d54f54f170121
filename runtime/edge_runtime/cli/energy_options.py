"""Options for energy, the meter they select, and the energy record of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from edge_devices.energy.live import EnergyWatch, RunEnergy, SharedWatch
from edge_devices.energy.virtual_meters import ESTIMATE, VIRTUAL, requested_meter, virtual_meter
from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters.base import Meter
from edge_devices.meters.search import find_meters, no_meter_reason
from edge_devices.option_fields import option
from edge_devices.waiting import terminal_wait
from edge_runtime.calibration.placement import PowerSource
from edge_runtime.calibration.power_probe import PowerProbe
from edge_runtime.config.schema import TuningConfig
from edge_runtime.drafting.phase_power import PhasePower, read_phase_power


@dataclass(frozen=True, kw_only=True)
class Energy:
    """The meter of a command's runs. `power` is the watts per phase for the objective energy; None if unknown."""

    system: System
    meter: Meter | None
    power: PhasePower | PowerSource | None
    reason: str = ""  # why there is no meter

    def or_estimate(self) -> Energy:
        """Returns the same with the power model of the device's profile where there is no meter; without one, the reason says why."""
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


@dataclass(frozen=True, kw_only=True)
class EnergyOptions:
    """The options of commands that name a meter or the watts of a machine."""

    meter: str | None = option(
        metavar="NAME",
        panel="Energy",
        help=f"Energy meter to read: a name from edge-devices meters, or {VIRTUAL}.  [default: the best usable meter, if any]",
    )
    phase_power: Path | None = option(
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="FILE",
        panel="Energy",
        help="JSON file with the watts of draft, verify and plain, for joules per token.  [default: measured on first use]",
    )

    def open(self, notify: Callable[[str], None], tuning: TuningConfig) -> Energy:
        """Opens the meter. Raises MeterError if the named one cannot be used, and a usage error for watts that nothing needs."""
        if self.phase_power is not None and tuning.objective == "time":
            raise click.UsageError("--phase-power is for --objective energy; leave one of them out")
        system = System()
        findings = find_meters(system)
        meter = requested_meter(system, findings, self.meter)
        power: PhasePower | PowerSource | None = None
        if self.phase_power is not None:
            power = read_phase_power(self.phase_power)
        elif meter is not None and not meter.facts.is_estimate:
            power = PowerProbe(system=system, meter=meter, notify=notify, waiting=terminal_wait)
        return Energy(system=system, meter=meter, power=power, reason="" if meter else no_meter_reason(findings))


def energy_record(energy: RunEnergy) -> dict[str, Any]:
    """Returns the energy part of a run's JSON: null and the reason if there is no figure per token."""
    if energy.joules_per_token is None:
        return {"energy": None, "energy_reason": energy.sentence()}
    return {"energy": energy.to_json()}
