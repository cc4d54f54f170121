"""Switches off the telemetry of the libraries that this project runs. Every package does so when it is imported.

onnxruntime reads its variable when its library is loaded, and then writes a device id and starts its uploader: `disable_telemetry_events()`
comes too late for both. So the variables are set before anything can import a library, and replace what was set: no part of this
project needs a report to anybody.
"""

from __future__ import annotations

import os

SWITCHES = {
    # 1, true, yes, on or y: no uploader, no events and no device id as long as the process lives (onnxruntime, Privacy.md; since 1.29).
    "ORT_DISABLE_TELEMETRY": "1",
    # No counting of downloads by library, and no versions in the user agent (huggingface_hub, constants.py).
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_XET_TELEMETRY_ENABLED": "0",
    # The convention of donottrack.sh, which libraries of others honour.
    "DO_NOT_TRACK": "1",
}


def switch_off() -> None:
    """Sets the variables for this process and the processes that it starts."""
    os.environ.update(SWITCHES)
