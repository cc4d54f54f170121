"""A host behind the system's own ssh and sftp: the user's configuration, keys and known hosts apply, and are never switched off."""

from __future__ import annotations

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


class SshTransport:
    """Implements Transport with `ssh HOST` and `sftp HOST`; HOST is whatever ssh understands. Its login shell must be a POSIX shell.

    One connection is shared by all commands (ControlMaster) and closed a minute after the last.
    """

    FOLDER = ".cache/edge-mtp/device"  # below the home folder, where ssh and sftp both begin

    def __init__(self, host: str, folder: str = FOLDER, options: Sequence[str] = ()) -> None:
        """`options`: more words for ssh and sftp, such as -F FILE. Raises TransportError for a host that would be read as an option."""
        if host.startswith("-") or not host.strip():
            raise TransportError(f"{host!r} is no host; give a name of your ssh configuration, or user@address")
        for tool in ("ssh", "sftp"):
            if not shutil.which(tool):
                raise TransportError(f"{tool} is not installed; install OpenSSH's client")
        self.name, self.folder, self._host = f"ssh:{host}", folder, host
        # The socket's path must stay below 104 characters, so it lives in the system's own temporary folder.
        sockets = tempfile.mkdtemp(prefix="edge-ssh-")
        self._removed = weakref.finalize(self, shutil.rmtree, sockets, ignore_errors=True)
        shared = ["ControlMaster=auto", f"ControlPath={sockets}/%C", "ControlPersist=60"]
        words = ["BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=15", *shared]
        self._options = [*options, *(part for word in words for part in ("-o", word))]

    def run(self, arguments: Sequence[str], *, seconds: float = COMMAND_SECONDS) -> CommandResult:
        """Runs a command on the host, in the home folder."""
        sealed = frame_command(arguments)
        done = run_command(["ssh", "-T", *self._options, "--", self._host, sealed.line], seconds=seconds, most=MAX_OUTPUT_BYTES)
        return sealed.answer(done, self._failure)

    def put(self, source: Path, target: str) -> None:
        """Copies a file to the host."""
        self._batch(f"put {sftp_word(str(source))} {sftp_word(target)}")

    def get(self, source: str, target: Path) -> None:
        """Copies a file from the host."""
        self._batch(f"get {sftp_word(source)} {sftp_word(str(target))}")

    def close(self) -> None:
        """Closes the shared connection."""
        run_command(["ssh", *self._options, "-O", "exit", "--", self._host], seconds=10)
        self._removed()

    def _batch(self, line: str) -> None:
        done = run_command(["sftp", "-q", *self._options, "-b", "-", "--", self._host], answer=f"{line}\n".encode(), seconds=3600)
        if done.code == SSH_FAILED and "Couldn't" not in done.errors:
            raise self._failure(done)
        if done.code != 0:
            raise TransportError(f"{self.name}: {last_line(done)}; see that there is room and that the folder may be written to")

    def _failure(self, done: CommandResult) -> TransportError:
        said = done.errors
        if "Host key verification failed" in said or "REMOTE HOST IDENTIFICATION HAS CHANGED" in said:
            changed = "has changed: find out why before you remove the old one" if "CHANGED" in said else "is not known"
            return TransportError(f"{self.name}: the host's key {changed}; connect once by hand with ssh and look at it")
        if re.search(r"Permission denied \(", said):
            return TransportError(f"{self.name}: no key of yours is accepted; set one up with ssh-copy-id (no password is ever asked for)")
        if "Could not resolve" in said:
            return TransportError(f"{self.name}: there is no host of this name; check it, or give an address")
        words = last_line(done) if said.strip() else "no answer"
        return LinkError(f"{self.name}: the link broke ({words}); what is on the device stays")


def sftp_word(text: str) -> str:
    """Quotes a file's name for a line of sftp, which takes *, ? and [ between quotes as they are. Raises TransportError for line ends."""
    if re.search(r"[\n\r\0]", text):
        raise TransportError(f"{text!r} has a line end in its name, which sftp cannot take; rename it")
    return '"' + re.sub(r'([\\"])', r"\\\1", text) + '"'
