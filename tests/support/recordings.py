"""The recorded machines of tests/devices/meters/fixtures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from edge_devices.meters.recorded_system import RecordedSystem, read_recording

FIXTURES = Path(__file__).parents[1] / "devices" / "meters" / "fixtures"


def recorded(name: str, **changes: str) -> RecordedSystem:
    """A fixture's machine, with some files changed (`__` stands for the path's last slash)."""
    recording = read_recording(FIXTURES / f"{name}.json")
    files = dict(recording.files)
    for file, text in changes.items():
        matches = [p for p in files if p.endswith(file.replace("__", "/"))]
        assert matches, file
        files.update(dict.fromkeys(matches, text))
    return RecordedSystem(dataclasses.replace(recording, files=files), clock=lambda: 1.0, sleep=lambda _: None)
