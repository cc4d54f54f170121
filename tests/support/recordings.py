"""The recorded machines of tests/devices/meters/fixtures."""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path

from edge_devices.remote.snapshot import RecordedSystem, Recording

FIXTURES = Path(__file__).parents[1] / "devices" / "meters" / "fixtures"


def read_recording(path: Path) -> Recording:
    """A recording in JSON: files by path, commands with exit code and output, binary traces in base64."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    commands = {each["command"]: (each["code"], each["output"]) for each in fields["commands"]}
    traces = {command: base64.b64decode(trace, validate=True) for command, trace in fields.get("traces", {}).items()}
    kept = {"platform": fields["platform"], "files": fields["files"], "denied": tuple(fields["denied"])}
    return Recording(**kept, commands=commands, traces=traces)


def recorded(name: str, **changes: str) -> RecordedSystem:
    """A fixture's machine, with some files changed (`__` stands for the path's last slash)."""
    recording = read_recording(FIXTURES / f"{name}.json")
    files = dict(recording.files)
    for file, text in changes.items():
        matches = [p for p in files if p.endswith(file.replace("__", "/"))]
        assert matches, file
        files.update(dict.fromkeys(matches, text))
    return RecordedSystem(dataclasses.replace(recording, files=files), clock=lambda: 1.0, sleep=lambda _: None)
