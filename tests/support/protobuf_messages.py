"""Messages in protobuf's wire format."""

from __future__ import annotations


def message(*fields: tuple[int, int | bytes]) -> bytes:
    """Fields by their numbers: numbers, negative ones too, and bytes, of which a message may be made."""
    parts = []
    for number, value in fields:
        wire = 0 if isinstance(value, int) else 2
        parts.append(_varint(number << 3 | wire) + (_varint(value) if isinstance(value, int) else _varint(len(value)) + value))
    return b"".join(parts)


def bytes_field(number: int, value: bytes) -> bytes:
    return message((number, value))


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])
