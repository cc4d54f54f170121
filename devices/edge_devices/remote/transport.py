"""Connections to other machines: the interface, and its implementations for phones (adb) and hosts (ssh).

The interface runs a command and copies a file to the device. File transfer (`file_sync`) and detached jobs (`jobs`) are built on it. A
command is a list of arguments, as for `subprocess`. The transport quotes them, so any path or prompt arrives unchanged.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import secrets
import shlex
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edge_devices.errors import LinkError, TransportError
from edge_devices.files.limited_read import parse_integer
from edge_devices.machine.system import CommandResult, run_command

COMMAND_SECONDS = 60.0
TIMED_OUT = 124  # the exit code of a command that was ended because it took too long
MAX_OUTPUT_BYTES = 64 << 20  # the longest real output is the list of a device package's files with their hashes


class Transport(Protocol):
    """A connection to a device.

    `name` is used in messages. Everything on the device is written to `folder`, except two files. One is `lock`, a link to the folder of
    the job that runs on the device, wherever that is. The other is `settings`, which holds the phone's own settings while a job changes
    them; it is "" if none are changed.
    """

    name: str
    folder: str
    lock: str
    settings: str

    def run(self, arguments: Sequence[str], *, seconds: float = COMMAND_SECONDS) -> CommandResult:
        """Runs a command and returns its output and exit code, which is 124 if it timed out. Raises LinkError if the connection is lost."""

    def put(self, source: Path, target: str) -> None:
        """Copies one file to the device, replacing `target`, whose folder must exist. A broken link may leave an incomplete file."""


def shell(transport: Transport, script: str, *arguments: str, seconds: float = COMMAND_SECONDS) -> str:
    """Runs an sh script ($1, $2, ... are `arguments`) and returns its output.

    Raises TransportError with the last line of its output if it fails. Raises LinkError if it does not end in time, because the device may
    be busy or swapping.
    """
    done = transport.run(["sh", "-c", script, "sh", *arguments], seconds=seconds)
    if done.code == TIMED_OUT:
        raise LinkError(f"{transport.name}: no answer in {seconds:g} s; files on the device are kept")
    if done.code != 0:
        raise TransportError(f"{transport.name}: {last_line(done)}")
    return done.text


def prepare_folder(transport: Transport) -> str:
    """Creates the transport's folder if needed and returns its absolute path. Raises TransportError if it is not writable."""
    folder = transport.folder if transport.folder.startswith("/") else f"./{transport.folder}"  # as it may begin with a dash
    return shell(transport, 'mkdir -p "$1" && cd "$1" && pwd && test -w .', folder).strip()


def last_line(done: CommandResult) -> str:
    """Returns the last line of a failed command's output, or its exit code."""
    lines = [line for line in (done.errors or done.text).splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit code {done.code}"


@dataclass(frozen=True)
class FramedCommand:
    """A command line that prints its exit code after its output, so that a broken link is never mistaken for a failed command.

    `mark` precedes the exit code in the output. If there is no separate channel for standard error, it follows the code.
    """

    line: str
    mark: bytes

    def parse(self, output: bytes, errors: str) -> CommandResult | None:
        """Returns the command's result; None if the end of its output is missing."""
        body, mark, rest = output.rpartition(self.mark)
        code, end, collected = rest.partition(b"\n")
        number = parse_integer(code.decode("ascii", "replace"))
        if not (mark and end) or number is None:  # without the line end, 13 could be the beginning of 137
            return None
        return CommandResult(code=number, output=body, errors=errors + collected.decode("utf-8", "replace"))

    def result(self, done: CommandResult, failure: Callable[[CommandResult], TransportError]) -> CommandResult:
        """Returns the command's result, or `done` if it timed out. Raises the error of `failure` for incomplete or too long output."""
        if done.code == TIMED_OUT:
            return done
        result = None if done.cut else self.parse(done.output, done.errors)
        if result is None:
            raise failure(done)
        return result


def frame_command(arguments: Sequence[str], *, separate: bool = True) -> FramedCommand:
    """Quotes a command for a POSIX shell and frames it with a marker. Raises TransportError for an argument with a NUL byte."""
    if any("\0" in argument for argument in arguments):
        raise TransportError("an argument with a NUL byte cannot be passed to a command; leave it out")
    mark = f"[{secrets.token_hex(8)}]"
    command = shlex.join(arguments)
    if separate:
        return FramedCommand(f"{command}; echo '{mark}'$?", mark.encode())
    # Descriptor 3 is the output; standard error is collected in the variable e.
    return FramedCommand(f"{{ e=$({{ {command}; }} 2>&1 1>&3 3>&-); c=$?; }} 3>&1; echo '{mark}'$c; printf %s \"$e\"", mark.encode())


# A phone, reached with the user's `adb`. Every command names the serial, so that no other attached phone gets it by accident.

STATES = {
    "unauthorized": "is not authorised; unlock the phone and accept this computer's key",
    "authorizing": "is being authorised; unlock the phone, accept this computer's key if it asks, and try again in a few seconds",
}
LINK_ERRORS = re.compile(
    r"error: (device|no devices|protocol|closed)|device .*(offline|not found)|no devices/emulators|connect failed|closed\Z", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class AdbDevice:
    """One line of `adb devices`. `state` is "device" if it is usable. A serial may contain blanks, as adb's names for mDNS do."""

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
    """Parses the output of `adb devices`, whose lines are a serial, a tab and a state."""
    lines = text.partition("List of devices attached")[2].splitlines()
    pairs = [line.rpartition("\t")[::2] for line in lines]
    return [AdbDevice(serial=serial, state=state.strip()) for serial, state in pairs if serial and state.strip()]


def usable_serials(report: Callable[[str], None] = lambda _text: None) -> list[str]:
    """Returns the serials for `--adb all`. Calls `report` for each unusable device. Raises TransportError if none is usable."""
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
    """Implements Transport with `adb -s SERIAL`. Without shell_v2 (Android before 7), standard error is part of the output."""

    FOLDER = "/data/local/tmp/edge-mtp"  # the shell user may write and execute here

    def __init__(self, serial: str, folder: str = FOLDER) -> None:
        """Prepares the commands, without connecting yet."""
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
            return LinkError(f"device {self.name} not found; connect it, or see `adb devices -l`")
        if "offline" in output:
            return LinkError(f"{self.name} is offline; plug it in again, or run `adb reconnect`")
        words = last_line(done) if (done.errors or done.text).strip() else "no answer"
        return LinkError(f"{self.name}: the link broke ({words}); files on the device are kept")


# A host, reached with the system's ssh and sftp. The user's configuration, keys and known hosts apply and are never overridden.

SSH_FAILED = 255
SOCKET_PREFIX = "edge-ssh-"


class SshTransport:
    """Implements Transport with `ssh HOST` and `sftp HOST`.

    HOST is anything that ssh accepts. Its login shell must be a POSIX shell. All commands share one connection (ControlMaster), which is
    closed a minute after the last command.
    """

    FOLDER = ".cache/edge-mtp/device"  # relative to the home folder, where both ssh and sftp start
    LOCK = ".cache/edge-mtp/running"

    def __init__(self, host: str, folder: str = FOLDER, options: Sequence[str] = ()) -> None:
        """`options` are further options of ssh and sftp, such as -F FILE. Raises TransportError if ssh would take the host as an option."""
        if host.startswith("-") or not host.strip():
            raise TransportError(f"{host!r} is not a host; give a name from your ssh configuration, or user@address")
        for tool in ("ssh", "sftp"):
            if not shutil.which(tool):
                raise TransportError(f"{tool} is not installed; install OpenSSH's client")
        self.name, self.folder, self.lock, self.settings, self._host = f"ssh:{host}", folder, self.LOCK, "", host
        # The socket's path must have fewer than 104 characters, so it is in the system's temporary folder.
        _clear_old_sockets()
        sockets = tempfile.mkdtemp(prefix=f"{SOCKET_PREFIX}{os.getpid()}-")
        shared = ["ControlMaster=auto", f"ControlPath={sockets}/%C", "ControlPersist=60"]
        words = ["BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=15", *shared]
        self._options = [*options, *(part for word in words for part in ("-o", word))]
        self._end_master = weakref.finalize(self, _end_master, list(self._options), host, sockets)

    def run(self, arguments: Sequence[str], *, seconds: float = COMMAND_SECONDS) -> CommandResult:
        """Runs a command on the host, in the home folder."""
        framed = frame_command(arguments)
        done = run_command(["ssh", "-T", *self._options, "--", self._host, framed.line], seconds=seconds, max_bytes=MAX_OUTPUT_BYTES)
        return framed.result(done, self._failure)

    def put(self, source: Path, target: str) -> None:
        """Copies a file to the host."""
        line = f"put {sftp_word(str(source))} {sftp_word(target)}\n"
        done = run_command(["sftp", "-q", *self._options, "-b", "-", "--", self._host], answer=line.encode(), seconds=3600)
        if done.code == SSH_FAILED and "Couldn't" not in done.errors:
            raise self._failure(done)
        if done.code != 0:
            raise TransportError(f"{self.name}: {last_line(done)}; check that there is free space and that the folder is writable")

    def close(self) -> None:
        """Closes the shared connection."""
        self._end_master()

    def _failure(self, done: CommandResult) -> TransportError:
        if done.cut:
            return TransportError(f"{self.name}: {last_line(done)}; restart the host, or leave it out")
        errors = done.errors
        if "Host key verification failed" in errors or "REMOTE HOST IDENTIFICATION HAS CHANGED" in errors:
            changed = "has changed: find out why before you remove the old one" if "CHANGED" in errors else "is not known"
            return TransportError(f"{self.name}: the host's key {changed}; connect once by hand with ssh and check it")
        if re.search(r"Permission denied \(", errors):
            return TransportError(f"{self.name}: none of your keys is accepted; set one up with ssh-copy-id (passwords are not used)")
        if "Could not resolve" in errors:
            return TransportError(f"{self.name}: no host of this name; check it, or give an address")
        words = last_line(done) if errors.strip() else "no answer"
        return LinkError(f"{self.name}: the link broke ({words}); files on the device are kept")


def _end_master(options: Sequence[str], host: str, sockets: str) -> None:
    """Ends the shared connection, if there is one, and removes its folder."""
    if any(Path(sockets).iterdir() if Path(sockets).is_dir() else ()):
        run_command(["ssh", *options, "-O", "exit", "--", host], seconds=10)
    shutil.rmtree(sockets, ignore_errors=True)


def _clear_old_sockets() -> None:
    """Removes the socket folders of this user's processes that were killed."""
    if not Path("/proc/self").exists():
        return  # without /proc, it is not known which processes run
    for folder in Path(tempfile.gettempdir()).glob(f"{SOCKET_PREFIX}*-*"):
        number = folder.name.removeprefix(SOCKET_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if number.isdecimal() and len(number) < 10 and folder.stat().st_uid == os.getuid() and not Path(f"/proc/{number}").exists():
                shutil.rmtree(folder, ignore_errors=True)


def sftp_word(text: str) -> str:
    """Quotes a file name for sftp, which does not expand *, ? and [ in quotes. Raises TransportError for line ends."""
    if re.search(r"[\n\r\0]", text):
        raise TransportError(f"{text!r} has a line end in its name, which sftp cannot take; rename it")
    return '"' + re.sub(r'([\\"])', r"\\\1", text) + '"'
