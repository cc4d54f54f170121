"""Just enough of protobuf's wire format to read a trace: fields by number, lengths checked before use.

Format: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator

from edge_devices.errors import MeterError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def fields_of(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields (field number, value) of a message: whole numbers, or bytes for strings and messages. Raises MeterError when cut off."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == BYTES:
            size, at = _varint(message, at)
        elif wire in (FIXED64, FIXED32):
            size = 8 if wire == FIXED64 else 4
        else:
            raise MeterError(f"the trace is damaged at byte {at}: wire type {wire}; record it again")
        if size > len(message) - at:
            raise MeterError(f"the trace is cut off at byte {at}: {size} bytes announced, {len(message) - at} there; record it again")
        yield number, message[at : at + size]
        at += size


def bytes_field(number: int, value: bytes) -> bytes:
    """Returns a field that holds bytes, as `fields_of` reads it."""
    return _encoded(number << 3 | BYTES) + _encoded(len(value)) + value


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise MeterError(f"the trace is damaged at byte {at}: a number does not end; record it again")
