"""The host of limited children, a process of its own: prepares what all jobs share, then forks once per job.

It has one thread and opens no model, so that its forks are safe and small. A child's memory is limited by the system, and its
processor time per step by a timer whose signal ends it: both hold in C code that never returns.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from edge_devices.children.commands import Limits
from edge_devices.children.frames import receive
from edge_devices.children.limited import limit_process


class Handler(Protocol):
    """A module with the work of a host. `MEMORY_BYTES` is what a child may allocate beyond the host's own memory."""

    MEMORY_BYTES: int

    def prepare(self, setup: bytes) -> Any:
        """Returns what all children share, from the first message."""

    def serve(self, shared: Any, connection: socket.socket) -> None:
        """Answers one job's messages; EOFError ends it. Must call `limited.limit_step` before each piece of work."""


def main(handler_name: str) -> None:
    """Serves until the control socket, the standard input, is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, whose end closes the socket
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes ended children
    handler: Any = import_module(handler_name)
    control = socket.socket(fileno=sys.stdin.fileno())
    with contextlib.suppress(EOFError):
        _serve(handler, control, handler.prepare(receive(control)))


def _serve(handler: Handler, control: socket.socket, shared: Any) -> None:
    gc.freeze()  # a collection would copy pages that the children share
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
    with contextlib.suppress(OSError, ValueError):  # elsewhere than on Linux only the time is limited
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return Limits(memory_bytes=used + memory_bytes if used else None, writes_files=False)
