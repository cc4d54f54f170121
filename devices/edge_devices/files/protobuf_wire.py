"""Reads Protobuf's wire format without schemas, as fields by number.

The length of a field is checked before memory is allocated for it. Format: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

Message = TypeVar("Message", bytes, memoryview)
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class WireError(ValueError):
    """A message that is cut off or malformed."""


def fields_of(message: Message) -> Iterator[tuple[int, int | Message]]:
    """Yields (field number, value). Values are integers, or the bytes of strings, messages, packed lists, fixed numbers. Raises WireError.

    Numbers of one byte are handled without a call, because a graph of 8 layers has 10,000 fields, and most of their numbers have one byte.
    """
    end, size = 0, len(message)
    while end < size:
        key, at = (message[end], end + 1) if message[end] < 0x80 else _varint(message, end)
        wire = key & 7
        if wire == BYTES:
            length, at = (message[at], at + 1) if at < size and message[at] < 0x80 else _varint(message, at)
        elif wire == VARINT:
            value, end = (message[at], at + 1) if at < size and message[at] < 0x80 else _varint(message, at)
            yield key >> 3, value
            continue
        elif wire in (FIXED64, FIXED32):
            length = 8 if wire == FIXED64 else 4
        else:
            raise WireError(f"wire type {wire} at byte {at}")
        if length > size - at:
            raise WireError(f"it is cut off at byte {at}: {length} bytes announced, {size - at} there")
        end = at + length
        yield key >> 3, message[at:end]


def varints(message: bytes | memoryview) -> Iterator[int]:
    """Yields the integers of a packed list. Raises WireError."""
    at = 0
    while at < len(message):
        value, at = _varint(message, at)
        yield value


def _varint(message: bytes | memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise WireError(f"a number does not end at byte {at}")
