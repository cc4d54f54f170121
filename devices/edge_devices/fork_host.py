"""A host of limited children: a separate process that prepares what all jobs share, and then forks once per job.

The host has one thread and opens no model, so that forks are safe and small. The system limits a child's memory, and a timer's signal
limits its processor time per step. Both also work in C code that never returns. The host and the process that uses it both run this module.
A message between them is its length, followed by that number of bytes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from edge_devices.children import Limits, limit_process
from edge_devices.errors import DeviceError, EdgeError

# Windows has no fork. There, a job runs in a thread of this process, within the libraries' own limits.
AVAILABLE = hasattr(os, "fork") and hasattr(socket, "send_fds") and hasattr(signal, "setitimer")
# The limit on processor time works only while a child runs. If it is stopped or waits for memory, it is abandoned after this time.
MAX_WAIT_SECONDS = 60.0
MAX_BYTES = 1 << 28
_LENGTH = struct.Struct("<I")
# A package's __init__ may import the whole package, so the handler's package is replaced by an empty module with the same folders.
_START = """
import json, sys, types
sys.path[:], package, folders, handler = json.loads(sys.argv[1])
if package:
    module = sys.modules[package] = types.ModuleType(package)
    module.__path__ = folders
from edge_devices.fork_host import main
main(handler)
"""


def send(connection: socket.socket, message: bytes) -> None:
    """Sends one message. Raises OSError if the other side is gone."""
    connection.sendall(_LENGTH.pack(len(message)) + message)


def receive(connection: socket.socket) -> bytes:
    """Returns the next message. Raises EOFError if the other side is gone, OSError, or ValueError for more than MAX_BYTES bytes."""
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if size > MAX_BYTES:
        raise ValueError(f"a message has {size} bytes; at most {MAX_BYTES} are expected")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError("the other side is gone")
        data += part
    return bytes(data)


class ChildError(Exception):
    """A child ended without an answer, because it exceeded its limits or crashed."""


class Child:
    """The process of one job. It ends when this object is deleted."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(MAX_WAIT_SECONDS)
        self._connection = connection
        self._close = weakref.finalize(self, connection.close)

    def ask(self, message: bytes) -> bytes:
        """Returns the answer to a message. Raises ChildError if there is none; then the child cannot be used any more."""
        try:
            send(self._connection, message)
            return receive(self._connection)
        except (OSError, EOFError, ValueError) as error:
            self._close()
            raise ChildError from error

    def close(self) -> None:
        self._close()


class Host:
    """A process that forks a child per job. `handler` is the module that does the work, and `setup` the message that prepares it."""

    def __init__(self, handler: str, setup: bytes, failure: type[EdgeError] = DeviceError) -> None:
        """Raises `failure` if the process cannot start."""
        self._handler, self._setup, self._failure = handler, setup, failure
        self._lock = threading.Lock()
        if AVAILABLE:
            self._start()

    def new_child(self) -> Child:
        """Returns a new child. Any thread may call this. Raises the host's `failure` if the process is gone and cannot be restarted."""
        ours, theirs = socket.socketpair()
        if not AVAILABLE:
            threading.Thread(target=self._serve_here, args=(theirs,), daemon=True).start()
            return Child(ours)
        with theirs, self._lock:
            try:
                socket.send_fds(self._control, [b"\x00"], [theirs.fileno()])
            except OSError:
                self._end()
                self._start()
                socket.send_fds(self._control, [b"\x00"], [theirs.fileno()])
        return Child(ours)

    @cached_property
    def _prepared(self) -> tuple[Handler, Any]:
        """The handler as imported in this process, and the data that all jobs share."""
        handler: Any = import_module(self._handler)
        return handler, handler.prepare(self._setup)

    def _serve_here(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(Exception):  # the connection's end is the answer, as for a child that crashes
            handler, shared = self._prepared
            handler.serve(shared, connection)

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
            send(control, self._setup)
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


class Handler(Protocol):
    """A module that does the work of a host's children. A child may allocate `MEMORY_BYTES` more than the host has."""

    MEMORY_BYTES: int

    def prepare(self, setup: bytes) -> Any:
        """Returns the data that all children share, from the first message."""

    def serve(self, shared: Any, connection: socket.socket) -> None:
        """Answers the messages of one job; an EOFError ends it. It must call `children.limit_step` before each piece of work."""


def main(handler_name: str) -> None:
    """Forks children until the control socket, which is the standard input, is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C, and its end closes the socket
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that the system removes ended children
    handler: Any = import_module(handler_name)
    control = socket.socket(fileno=sys.stdin.fileno())
    with contextlib.suppress(EOFError):
        _serve(handler, control, handler.prepare(receive(control)))


def _serve(handler: Handler, control: socket.socket, shared: Any) -> None:
    gc.freeze()  # garbage collection would write to shared pages, and so copy them
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            if os.fork() == 0:
                _run_child(handler, control, connection, shared)


def _run_child(handler: Handler, control: socket.socket, connection: socket.socket, shared: Any) -> None:
    code = 1
    try:
        control.close()
        limit_process(_limits(handler.MEMORY_BYTES))
        with contextlib.suppress(EOFError, OSError):
            handler.serve(shared, connection)
        code = 0
    finally:
        os._exit(code)


def _limits(memory_bytes: int) -> Limits:
    used = 0
    with contextlib.suppress(OSError, ValueError):  # on other systems than Linux, only the time is limited
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return Limits(memory_bytes=used + memory_bytes if used else None, writes_files=False)
