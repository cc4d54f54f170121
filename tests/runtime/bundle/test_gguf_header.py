"""Headers of GGUF files that claim too much, or what cannot be. Random damage: tests/fuzz."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from edge_runtime.bundle.gguf_header import GgufError, read_gguf_header

HEADER = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
KEY = struct.pack("<Q", 1) + b"k"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"GGML" + bytes(100), "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "GGUF version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 8193, 0), "claims 8193 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1025), "claims 0 tensors and 1025 keys"),
        (HEADER + struct.pack("<Q", 1 << 16), "a string claims"),
        (HEADER + struct.pack("<Q", 60_000), "ends after the end"),
        (HEADER + KEY + struct.pack("<IQ", 8, (1 << 20) + 1), "a string claims"),
        (HEADER + KEY + struct.pack("<I", 77), "unknown type 77"),
        (HEADER + KEY + struct.pack("<IIQ", 9, 8, (1 << 22) + 1), "claims 4194305 strings"),
        (HEADER + KEY + struct.pack("<IIQ", 9, 10, 1 << 60), "ends after the end"),
        (HEADER + KEY + struct.pack("<IIQ", 9, 9, 1), "unknown type 9"),
    ],
)
def test_keys(data: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(GgufError, match=sentence):
        read_gguf_header(path)


def tensor_file(path: Path, *infos: bytes) -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, len(infos), 0) + b"".join(infos) + bytes(256))
    return path


def info(*shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return struct.pack("<Q", 1) + b"t" + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def test_a_sound_tensor_is_read(tmp_path: Path) -> None:
    assert read_gguf_header(tensor_file(tmp_path / "good.gguf", info(8))).tensors[0].bytes == 32


@pytest.mark.parametrize(
    ("infos", "sentence"),
    [
        ([info(1 << 40)], "is truncated: 't' ends at byte"),
        ([info(8, offset=1 << 40)], "is truncated"),
        ([info(8, offset=4)], "at offset 4"),
        ([info(0)], r"shape \[0\]"),
        ([info(8, kind=2)], "of type 2"),
        ([info(8, kind=99)], "unknown type 99"),
        ([info(1, 1, 1, 1, 1)], "5 dimensions"),
        ([info(8), info(8)], "occurs twice"),
    ],
)
def test_tensors(infos: list[bytes], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=sentence):
        read_gguf_header(tensor_file(tmp_path / "bad.gguf", *infos))
