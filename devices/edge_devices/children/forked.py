"""Starts the host of limited children, and connects to a new child of it for each job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from importlib import import_module
from pathlib import Path

from edge_devices.children import frames
from edge_devices.errors import DeviceError, EdgeError

# Windows has no fork: there, work is done in this process, within the libraries' own limits.
AVAILABLE = hasattr(os, "fork") and hasattr(socket, "send_fds") and hasattr(signal, "setitimer")
# A limit of processor time holds only while a child runs: one that is stopped, or waits for memory, is given up after this.
MAX_WAIT_SECONDS = 60.0
# A package's __init__ may load all of it; the parts of the handler's package are found without it.
_START = """
import json, sys, types
sys.path[:], package, folders, handler = json.loads(sys.argv[1])
if package:
    module = sys.modules[package] = types.ModuleType(package)
    module.__path__ = folders
from edge_devices.children.fork_host import main
main(handler)
"""


class ChildError(Exception):
    """A child ended without an answer: it exceeded its limits, or crashed."""


class Child:
    """One job's process. It ends when this object does."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(MAX_WAIT_SECONDS)
        self._connection = connection
        self._close = weakref.finalize(self, connection.close)

    def ask(self, message: bytes) -> bytes:
        """Returns the answer to a message. Raises ChildError if there is none, now and from then on."""
        try:
            frames.send(self._connection, message)
            return frames.receive(self._connection)
        except (OSError, EOFError, ValueError) as error:
            self._close()
            raise ChildError from error

    def close(self) -> None:
        """Ends the process."""
        self._close()


class Host:
    """A process that forks a child per job. `handler` is the module of its work, `setup` the message that prepares it."""

    def __init__(self, handler: str, setup: bytes, failure: type[EdgeError] = DeviceError) -> None:
        """Raises `failure` if the process cannot start."""
        self._handler, self._setup, self._failure = handler, setup, failure
        self._lock = threading.Lock()
        self._start()

    def new_child(self) -> Child:
        """Returns a new child; any thread may call. Raises the host's failure if the process is gone and cannot be started again."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                socket.send_fds(self._control, [b"\x00"], [theirs.fileno()])
            except OSError:
                self._end()
                self._start()
                socket.send_fds(self._control, [b"\x00"], [theirs.fileno()])
        return Child(ours)

    def _start(self) -> None:
        control, theirs = socket.socketpair()
        package = self._handler.partition(".")[0] if "." in self._handler else ""
        folders = list(import_module(package).__path__) if package else []
        arguments = json.dumps([[str(Path(folder).absolute()) for folder in sys.path], package, folders, self._handler])
        try:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _START, arguments],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "MALLOC_ARENA_MAX": "1"},
                    start_new_session=True,
                )
            self._control = control
            self._end = weakref.finalize(self, _end, control, process)
            frames.send(control, self._setup)
        except OSError as error:
            control.close()
            reason = f"({error}); check that {sys.executable} can be run"
            raise self._failure(f"the process for hostile input could not be started {reason}") from error


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
