"""Messages between a process and its limited children: a length and that many bytes."""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("<I")
MAX_BYTES = 1 << 28


def send(connection: socket.socket, message: bytes) -> None:
    """Sends one message. Raises OSError if the other side is gone."""
    connection.sendall(_LENGTH.pack(len(message)) + message)


def receive(connection: socket.socket, limit: int = MAX_BYTES) -> bytes:
    """Returns the next message. Raises EOFError if the other side is gone, OSError, or ValueError for more than `limit` bytes."""
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if size > limit:
        raise ValueError(f"a message has {size} bytes; at most {limit} are expected")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError("the other side is gone")
        data += part
    return bytes(data)
