"""NVIDIA Jetson: the module's INA3221 rails.

Files: in{n}_label, in{n}_input (mV), curr{n}_input (mA) of the ina3221 driver; before JetPack 5 rail_name_{n} and
in_power{n}_input (mW) under iio.
The rails behind VDD_IN are parts of it: only the module's input is read. On Orin the processor and the graphics share one rail.
AGX Orin senses no input: its three supplies are summed, without VDDQ_VDD2_1V8AO, which VIN_SYS_5V0 feeds.
Thor's input, VIN, is an INA238's.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_devices.machine.system import System
from edge_devices.meters.base import Finding, Kind, MeterFacts, Scope, SumMeter, absent, required_product, tried

HWMON = "sys/bus/i2c/drivers/ina3221*/*/hwmon/hwmon*"
IIO = "sys/bus/i2c/drivers/ina3221x/*/iio:device*"
INA238 = "sys/bus/i2c/drivers/ina238/*/hwmon/hwmon*"
INPUTS = ("VDD_IN", "POM_5V_IN", "VIN")
FED_BY_OTHERS = ("VDDQ_VDD2_1V8AO",)
RAILS_ALONE = "the module's rails, not its input: reads lower than a meter in the supply line"
NOT_RAILS = ("NC", "sum of shunt voltages")
NAME = "jetson"


@dataclass(frozen=True, kw_only=True)
class Rail:
    """One rail: the files whose product (mV × mA) or only content (mW × 1000) is microwatts."""

    label: str
    paths: tuple[str, ...]
    scale: float


def rails(system: System) -> list[Rail]:
    """Returns the rails this module senses."""
    sensed = []
    for folder in system.paths(HWMON):
        for n in range(1, 7):
            label = system.text_or(f"{folder}/in{n}_label")
            if label and label not in NOT_RAILS and system.exists(f"{folder}/curr{n}_input"):
                sensed.append(Rail(label=label, paths=(f"{folder}/in{n}_input", f"{folder}/curr{n}_input"), scale=1e-6))
    for folder in system.paths(INA238) if sensed else ():  # by itself such a chip is hwmon's
        if system.exists(f"{folder}/power1_input"):
            sensed.append(Rail(label=system.text_or(f"{folder}/in1_label") or "VIN", paths=(f"{folder}/power1_input",), scale=1e-6))
    for folder in system.paths(IIO):
        for n in range(3):
            label = system.text_or(f"{folder}/rail_name_{n}")
            if label and label not in NOT_RAILS:
                sensed.append(Rail(label=label, paths=(f"{folder}/in_power{n}_input",), scale=1e-3))
    return sensed


def module_meter(system: System, sensed: list[Rail]) -> SumMeter:
    """Returns the meter of the module's input, in watts; where a board senses none, of the sum of its rails."""
    inputs = [r for r in sensed if r.label in INPUTS]
    summed = inputs or [r for r in sensed if r.label not in FED_BY_OTHERS]
    facts = MeterFacts(
        name=NAME,
        kind=Kind.SAMPLER,
        scope=Scope.MODULE if inputs else Scope.RAILS,
        source=", ".join(r.label for r in summed),
        refresh_s=0.1,
        resolution=0.001,
        poll_s=0.1,
        systematic="chip 0.1-0.5 %, and the shunts' tolerance",
        notes=() if inputs else (RAILS_ALONE,),
    )
    return SumMeter(system, facts, lambda: [(rail.label, rail.scale * required_product(system, rail.paths)) for rail in summed])


def find(system: System) -> list[Finding]:
    """Returns the finding of the module's sensors; an empty list on other machines."""
    sensed = rails(system)
    model = system.text_or("proc/device-tree/model")
    if not sensed:
        return [absent(NAME, "no ina3221 rails on this Jetson")] if "Jetson" in model else []
    if not any(r.label in INPUTS or "VDD" in r.label for r in sensed):
        return []
    return [tried(module_meter(system, sensed))]
