"""Fields of protobuf messages, to put damaged ones together."""

from __future__ import annotations

from edge_devices.files.protobuf_wire import BYTES


def bytes_field(number: int, value: bytes) -> bytes:
    """Returns a field that holds bytes, as `fields_of` reads it."""
    return _encoded(number << 3 | BYTES) + _encoded(len(value)) + value


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
