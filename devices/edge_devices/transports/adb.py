"""A phone reached with the user's `adb`. Every command names the serial, so no other attached phone receives it by accident."""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_devices.errors import LinkError, TransportError
from edge_devices.machine.system import CommandResult, run_command
from edge_devices.transports.base import COMMAND_SECONDS, MAX_OUTPUT_BYTES, frame_command, last_line

NOT_FOUND = "not found; connect it, or see `adb devices -l`"
UNAUTHORIZED = "is not authorised; unlock the phone and accept this computer's key"
AUTHORIZING = "is being authorised; unlock the phone, accept this computer's key if it asks, and try again in a few seconds"
STATES = {"unauthorized": UNAUTHORIZED, "authorizing": AUTHORIZING}
LINK_ERRORS = re.compile(
    r"error: (device|no devices|protocol|closed)|device .*(offline|not found)|no devices/emulators|connect failed|closed\Z", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class AdbDevice:
    """One line of `adb devices`; `state`: "device" when it is usable. A serial may have blanks, as adb's own names of mDNS do."""

    serial: str
    state: str


def find_adb() -> str:
    """Returns the path of adb. Raises TransportError if it is not installed."""
    path = shutil.which("adb")
    if not path:
        raise TransportError("adb is not installed; install Android's platform-tools, or Debian's package adb")
    return path


def adb_devices() -> list[AdbDevice]:
    """Returns the connected devices, usable or not. Raises TransportError if adb fails."""
    done = run_command([find_adb(), "devices"], seconds=20)
    if done.code != 0:
        raise TransportError(f"adb devices failed: {last_line(done)}")
    return parse_devices(done.text)


def parse_devices(text: str) -> list[AdbDevice]:
    """Parses the output of `adb devices`: a serial, a tab and a state each line."""
    lines = text.partition("List of devices attached")[2].splitlines()
    pairs = [line.rpartition("\t")[::2] for line in lines]
    return [AdbDevice(serial=serial, state=state.strip()) for serial, state in pairs if serial and state.strip()]


def usable_serials(report: Callable[[str], None] = lambda _text: None) -> list[str]:
    """Returns the serials behind `--adb all`; calls `report` with each unusable one. Raises TransportError if none is usable."""
    listed = adb_devices()
    if not listed:
        raise TransportError("adb lists no device; connect one and turn on USB debugging, or use `adb connect`")
    unfit = [
        f"{device.serial} {STATES.get(device.state, f'is {device.state}; plug it in again')}"
        for device in listed
        if device.state != "device"
    ]
    if len(unfit) == len(listed):
        raise LinkError("; ".join(unfit))
    for text in unfit:
        report(f"left out: {text}")
    return [device.serial for device in listed if device.state == "device"]


class AdbTransport:
    """Implements Transport with `adb -s SERIAL`. Without shell_v2 (Android before 7) exit codes are read from the end of the output."""

    FOLDER = "/data/local/tmp/edge-mtp"  # the shell user may write and execute here

    def __init__(self, serial: str, folder: str = FOLDER) -> None:
        """Does not connect yet."""
        self.name = f"adb:{serial}"
        beside = posixpath.dirname(self.FOLDER)
        self.folder, self.lock, self.settings = folder, f"{beside}/.edge-mtp-running", f"{beside}/.edge-mtp-settings"
        self._adb = [find_adb(), "-s", serial]
        self._has_exit_codes: bool | None = None

    def run(self, arguments: Sequence[str], *, seconds: float = COMMAND_SECONDS) -> CommandResult:
        """Runs a command on the phone."""
        separate = self._supports_exit_codes()
        framed = frame_command(arguments, separate=separate)
        way = ["shell", "-T"] if separate else ["exec-out"]
        done = run_command([*self._adb, *way, framed.line], seconds=seconds, max_bytes=MAX_OUTPUT_BYTES)
        return framed.result(done, self._failure)

    def put(self, source: Path, target: str) -> None:
        done = run_command([*self._adb, "push", str(source), target], seconds=3600)
        if done.code != 0:
            raise self._failure(done)

    def _supports_exit_codes(self) -> bool:
        if self._has_exit_codes is None:
            done = run_command([*self._adb, "features"], seconds=20)
            if done.code != 0:
                raise self._failure(done)
            self._has_exit_codes = "shell_v2" in done.text.split()
        return self._has_exit_codes

    def _failure(self, done: CommandResult) -> TransportError:
        if done.cut:
            return TransportError(f"{self.name}: {last_line(done)}; restart the device, or leave it out")
        output = f"{done.text}\n{done.errors}"
        for state, words in STATES.items():
            if state in output:
                return LinkError(f"{self.name} {words}")
        if "No space left" in output:
            return TransportError(f"{self.name}: no space left on the device; delete files there, or `--clean` an earlier run")
        if "Permission denied" in output or "Read-only" in output:
            return TransportError(f"{self.name}: {last_line(done)}; choose another --device-folder")
        if "remote" in output and not LINK_ERRORS.search(output):
            return TransportError(f"{self.name}: {last_line(done)}")
        if "not found" in output or "no devices" in output:
            return LinkError(f"device {self.name} {NOT_FOUND}")
        if "offline" in output:
            return LinkError(f"{self.name} is offline; plug it in again, or run `adb reconnect`")
        words = last_line(done) if (done.errors or done.text).strip() else "no answer"
        return LinkError(f"{self.name}: the link broke ({words}); files on the device are kept")
