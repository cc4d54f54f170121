"""This machine, as if it were a device: what tests and dry runs deploy to."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from edge_devices.errors import TransportError
from edge_devices.machine.system import CommandResult, run_command
from edge_devices.remote.transport import COMMAND_SECONDS, MAX_OUTPUT_BYTES


class LocalTransport:
    """Implements Transport with this machine's own shell and files below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.name = "local"
        self.folder = str(folder.resolve())
        self.lock, self.settings = f"{self.folder}.lock", ""

    def run(self, arguments: Sequence[str], *, seconds: float = COMMAND_SECONDS) -> CommandResult:
        return run_command(arguments, seconds=seconds, max_bytes=MAX_OUTPUT_BYTES)

    def put(self, source: Path, target: str) -> None:
        try:
            shutil.copyfile(source, target)
        except OSError as error:
            raise TransportError(f"{target} cannot be written: {error.strerror}.") from error
