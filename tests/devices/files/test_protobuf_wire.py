"""Messages in protobuf's wire format, complete and damaged."""

from __future__ import annotations

import pytest

from edge_devices.files.protobuf_wire import WireError, fields_of, varints
from protobuf_messages import bytes_field

MESSAGE = bytes_field(3, b"abc") + bytes([1 << 3, 0xAC, 0x02]) + bytes([2 << 3 | 1]) + b"12345678" + bytes([4 << 3 | 5]) + b"1234"


@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_fields_of_each_wire_type(kind):
    assert list(fields_of(kind(MESSAGE))) == [(3, b"abc"), (1, 300), (2, b"12345678"), (4, b"1234")]


def test_a_packed_list():
    assert list(varints(b"\x01\xac\x02")) == [1, 300]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"\x0b", "wire type 3 at byte 1"),
        (bytes_field(1, b"abc")[:-1], "it is cut off at byte 2: 3 bytes announced, 2 there"),
        (b"\x08" + b"\xff" * 11, "a number does not end"),
        (b"\x08\x80", "a number does not end"),
    ],
)
def test_damaged_messages(message, reason):
    with pytest.raises(WireError, match=reason):
        list(fields_of(message))
