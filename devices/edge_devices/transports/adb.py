"""A phone behind the user's own `adb`. The serial is always explicit: a second phone on the desk never gets a command by accident."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_devices.errors import LinkError, TransportError
from edge_devices.machine.system import CommandResult, run_command
from edge_devices.transports.base import COMMAND_SECONDS, MAX_OUTPUT_BYTES, frame_command, last_line

NOT_THERE = "is not there; plug it in, or see `adb devices -l`"
UNAUTHORIZED = "is not authorised; unlock the phone and accept this computer's key"
LINK_WORDS = re.compile(
    r"error: (device|no devices|protocol|closed)|device .*(offline|not found)|no devices/emulators|connect failed|closed\Z", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class AdbDevice:
    """One line of `adb devices -l`; `state` is "device" when it can be used."""

    serial: str
    state: str
    model: str


def find_adb() -> str:
    """Returns the path of adb. Raises TransportError where it is not installed."""
    found = shutil.which("adb")
    if not found:
        raise TransportError("adb is not installed; install Android's platform-tools, or Debian's package adb")
    return found


def adb_devices() -> list[AdbDevice]:
    """Returns what is connected, usable or not. Raises TransportError when adb cannot tell."""
    done = run_command([find_adb(), "devices", "-l"], seconds=20)
    if done.code != 0:
        raise TransportError(f"adb devices failed: {last_line(done)}")
    return parse_devices(done.text)


def parse_devices(text: str) -> list[AdbDevice]:
    """Reads the answer of `adb devices -l`."""
    found = []
    for line in text.partition("List of devices attached")[2].splitlines():
        serial, _, rest = line.partition(" ")
        words = rest.split()
        if serial and words:
            model = next((w.removeprefix("model:") for w in words if w.startswith("model:")), "")
            found.append(AdbDevice(serial=serial, state=words[0], model=model))
    return found


def usable_serials(said: Callable[[str], None] = lambda _text: None) -> list[str]:
    """Returns the serials behind `--adb all`; `said` hears of those that cannot be used. Raises TransportError when none can."""
    listed = adb_devices()
    if not listed:
        raise TransportError("adb sees no device; plug one in, turn on USB debugging, or `adb connect` it")
    unfit = [
        f"{one.serial} {UNAUTHORIZED if one.state == 'unauthorized' else f'is {one.state}; plug it in again'}"
        for one in listed
        if one.state != "device"
    ]
    if len(unfit) == len(listed):
        raise LinkError("; ".join(unfit))
    for text in unfit:
        said(f"left out: {text}")
    return [one.serial for one in listed if one.state == "device"]


class AdbTransport:
    """Implements Transport with `adb -s SERIAL`. Without shell_v2 (Android before 7) exit codes come from the output's end."""

    FOLDER = "/data/local/tmp/edge-mtp"  # the shell user may write and execute here

    def __init__(self, serial: str, folder: str = FOLDER) -> None:
        """Asks nothing yet."""
        self.name = f"adb:{serial}"
        self.folder = folder
        self._adb = [find_adb(), "-s", serial]
        self._has_exit_codes: bool | None = None

    def run(self, arguments: Sequence[str], *, seconds: float = COMMAND_SECONDS) -> CommandResult:
        """Runs a command on the phone."""
        separate = self._knows_exit_codes()
        sealed = frame_command(arguments, separate=separate)
        way = ["shell", "-T"] if separate else ["exec-out"]
        done = run_command([*self._adb, *way, sealed.line], seconds=seconds, most=MAX_OUTPUT_BYTES)
        return sealed.answer(done, self._failure)

    def put(self, source: Path, target: str) -> None:
        """Pushes a file."""
        self._copy("push", str(source), target)

    def get(self, source: str, target: Path) -> None:
        """Pulls a file."""
        self._copy("pull", source, str(target))

    def _copy(self, verb: str, source: str, target: str) -> None:
        done = run_command([*self._adb, verb, source, target], seconds=3600)
        if done.code != 0:
            raise self._failure(done)

    def _knows_exit_codes(self) -> bool:
        if self._has_exit_codes is None:
            done = run_command([*self._adb, "features"], seconds=20)
            if done.code != 0:
                raise self._failure(done)
            self._has_exit_codes = "shell_v2" in done.text.split()
        return self._has_exit_codes

    def _failure(self, done: CommandResult) -> TransportError:
        said = f"{done.text}\n{done.errors}"
        if "unauthorized" in said:
            return LinkError(f"{self.name} {UNAUTHORIZED}")
        if "No space left" in said:
            return TransportError(f"{self.name}: no space left on the device; delete something, or `--clean` an earlier run")
        if "Permission denied" in said or "Read-only" in said:
            return TransportError(f"{self.name}: {last_line(done)}; choose another --device-folder")
        if "remote" in said and not LINK_WORDS.search(said):
            return TransportError(f"{self.name}: {last_line(done)}")
        if "not found" in said or "no devices" in said:
            return LinkError(f"{self.name} {NOT_THERE}")
        if "offline" in said:
            return LinkError(f"{self.name} is offline; plug it in again, or run `adb reconnect`")
        words = last_line(done) if (done.errors or done.text).strip() else "no answer"
        return LinkError(f"{self.name}: the link broke ({words}); what is on the device stays")
