"""A host reached with the system's ssh and sftp. The user's configuration, keys and known hosts apply and are never overridden."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

from edge_devices.errors import LinkError, TransportError
from edge_devices.machine.system import CommandResult, run_command
from edge_devices.transports.base import COMMAND_SECONDS, MAX_OUTPUT_BYTES, frame_command, last_line

SSH_FAILED = 255
PREFIX = "edge-ssh-"


class SshTransport:
    """Implements Transport with `ssh HOST` and `sftp HOST`; HOST is whatever ssh understands. Its login shell must be a POSIX shell.

    One connection is shared by all commands (ControlMaster) and closed a minute after the last.
    """

    FOLDER = ".cache/edge-mtp/device"  # below the home folder, where ssh and sftp both begin
    LOCK = ".cache/edge-mtp/running"

    def __init__(self, host: str, folder: str = FOLDER, options: Sequence[str] = ()) -> None:
        """`options`: further options of ssh and sftp, such as -F FILE. Raises TransportError for a host that would be read as an option."""
        if host.startswith("-") or not host.strip():
            raise TransportError(f"{host!r} is not a host; give a name from your ssh configuration, or user@address")
        for tool in ("ssh", "sftp"):
            if not shutil.which(tool):
                raise TransportError(f"{tool} is not installed; install OpenSSH's client")
        self.name, self.folder, self.lock, self.settings, self._host = f"ssh:{host}", folder, self.LOCK, "", host
        # The socket's path must stay below 104 characters, so it lives in the system's own temporary folder.
        _clear_old_sockets()
        sockets = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")
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
    """Removes the folders of processes of this user that were killed and no longer run."""
    if not Path("/proc/self").exists():
        return  # it cannot be told which processes run
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        number = folder.name.removeprefix(PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if number.isdecimal() and len(number) < 10 and folder.stat().st_uid == os.getuid() and not Path(f"/proc/{number}").exists():
                shutil.rmtree(folder, ignore_errors=True)


def sftp_word(text: str) -> str:
    """Quotes a file name for sftp, which does not expand *, ? and [ inside quotes. Raises TransportError for line ends."""
    if re.search(r"[\n\r\0]", text):
        raise TransportError(f"{text!r} has a line end in its name, which sftp cannot take; rename it")
    return '"' + re.sub(r'([\\"])', r"\\\1", text) + '"'
