"""Recordings of the files and command outputs that meters read: a device from afar is read with one command, and tests have devices that
are not at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from edge_devices.machine.system import CommandResult, System


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Texts of files and outputs of commands. `denied`: files that exist but are not readable; `traces`: binary outputs."""

    platform: str = "linux"
    files: dict[str, str] = field(default_factory=dict)
    denied: tuple[str, ...] = ()
    commands: dict[str, tuple[int, str]] = field(default_factory=dict)
    traces: dict[str, bytes] = field(default_factory=dict)


class RecordedSystem(System):
    """A machine that is only a recording; every command not in it is unknown."""

    def __init__(self, recording: Recording, **fields: Any) -> None:
        """`fields`: clock and sleep, where a test needs its own."""
        answers = recording.commands

        def run(arguments: Sequence[str], answer: bytes = b"", seconds: float = 10.0) -> CommandResult:  # noqa: ARG001
            command = " ".join(arguments)
            if command in recording.traces:
                return CommandResult(code=0, output=recording.traces[command])
            code, text = answers.get(command, (127, ""))
            return CommandResult(code=code, output=text.encode("utf-8", "replace"))

        super().__init__(platform=recording.platform, run=run, **fields)
        object.__setattr__(self, "_recording", recording)
        object.__setattr__(self, "_paths", sorted({*recording.files, *recording.denied}))

    def text(self, path: str) -> str:
        """Returns a recorded file; raises as on the device."""
        recording: Recording = vars(self)["_recording"]
        if path in recording.denied:
            raise PermissionError(13, "Permission denied", path)
        if path not in recording.files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return recording.files[path].strip()

    def paths(self, pattern: str) -> list[str]:
        """Returns the recorded files and their folders that match, sorted."""
        parts = pattern.split("/")
        heads = {tuple(p.split("/")[: len(parts)]) for p in vars(self)["_paths"]}
        return sorted("/".join(h) for h in heads if len(h) == len(parts) and all(map(fnmatchcase, h, parts)))

    def exists(self, path: str) -> bool:
        """Returns whether a file or folder was there."""
        return any(p == path or p.startswith(path + "/") for p in vars(self)["_paths"])
