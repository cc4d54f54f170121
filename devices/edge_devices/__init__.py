"""The lowest package: files, this machine, meters, energy, other devices. It knows nothing about models.

The names below are the public interface. Each is imported when it is first used. Nothing else is imported here, because the four commands
start with this module, before Ctrl-C can be handled.

It also switches off the telemetry of libraries that this project uses, so the other packages import it first. When onnxruntime's library is
loaded, it reads its variable, and then may write a device id and start its uploader. `disable_telemetry_events()` would be too late for
both. So the variables are set before any library can be imported. They replace the user's values, because no part of this project needs
telemetry.
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

# Environment variables for this process and the processes that it starts.
SWITCHES = {
    # Prevents the uploader, events and the device id as long as the process lives (onnxruntime, Privacy.md; since 1.29).
    "ORT_DISABLE_TELEMETRY": "1",
    # Prevents counting of downloads by library, and versions in the user agent (huggingface_hub, constants.py).
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_XET_TELEMETRY_ENABLED": "0",
    # The convention of donottrack.sh, which other libraries follow.
    "DO_NOT_TRACK": "1",
}
os.environ.update(SWITCHES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edge_devices' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"edge_devices.{_HOMES[name]}"), name)
