"""The lowest package: files, this machine, meters, energy, other devices. Knows no model.

What is named here is the public interface; each name is imported when it is first used. Nothing else is imported: the four commands begin
here, before anything can answer Ctrl-C.
"""

from __future__ import annotations

from edge_devices.telemetry import switch_off

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from edge_devices.energy.live import EnergyWatch
    from edge_devices.energy.protocol import measure
    from edge_devices.energy.report import make_report
    from edge_devices.machine.system import System
    from edge_devices.meters.search import choose_meter, find_meters

_HOMES = {
    "EnergyWatch": "energy.live",
    "System": "machine.system",
    "choose_meter": "meters.search",
    "find_meters": "meters.search",
    "make_report": "energy.report",
    "measure": "energy.protocol",
}
__all__ = ["EnergyWatch", "System", "choose_meter", "find_meters", "make_report", "measure"]

switch_off()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edge_devices' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"edge_devices.{_HOMES[name]}"), name)
