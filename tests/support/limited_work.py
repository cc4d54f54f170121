"""Work of a limited child for tests: answers, spins, allocates, crashes, and says what its system limits are."""

from __future__ import annotations

import os
import re
import socket
import tempfile

from edge_devices.children import limit_step
from edge_devices.fork_host import receive, send

MEMORY_BYTES = 96 << 20
STEP_SECONDS = 0.3


def prepare(setup: bytes) -> bytes:
    return setup


def serve(shared: bytes, connection: socket.socket) -> None:
    while True:
        limit_step(0)
        message = receive(connection)
        limit_step(STEP_SECONDS)
        if message == b"spin in C":
            re.match("(a*)*b", "a" * 64)
        elif message == b"allocate":
            send(connection, str(len(bytearray(1 << 30))).encode())
        elif message == b"crash":
            os.abort()
        elif message == b"write":
            with tempfile.TemporaryFile() as file:
                file.write(b"x" * 10)
        send(connection, shared + message + str(os.getpid()).encode())
