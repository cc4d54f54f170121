"""The lowest package: files, this machine, meters, energy, other devices. Knows no model.

What is named here is the public interface; each name is imported when it is first used. Nothing else is imported: the four commands begin
here, before anything can answer Ctrl-C.

It switches off the telemetry of the libraries that this project runs; the other packages import it first. onnxruntime reads its variable
when its library is loaded, and then writes a device id and starts its uploader: `disable_telemetry_events()` comes too late for both. So
the variables are set before anything can import a library, and replace what was set: no part of this project needs a report to anybody.
"""

from __future__ import annotations

import os

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

# For this process and the processes that it starts.
SWITCHES = {
    # 1, true, yes, on or y: no uploader, no events and no device id as long as the process lives (onnxruntime, Privacy.md; since 1.29).
    "ORT_DISABLE_TELEMETRY": "1",
    # No counting of downloads by library, and no versions in the user agent (huggingface_hub, constants.py).
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_XET_TELEMETRY_ENABLED": "0",
    # The convention of donottrack.sh, which libraries of others honour.
    "DO_NOT_TRACK": "1",
}
os.environ.update(SWITCHES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edge_devices' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"edge_devices.{_HOMES[name]}"), name)
