"""The table of GGUF types against the gguf package, and headers that claim too much, or what cannot be. Random damage: tests/fuzz."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from edge_runtime.bundle.gguf_header import GgufError, read_gguf_header

gguf = pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_runtime.bundle.gguf_header import MIXED, OFFERED, QUANTIZATIONS, TENSOR_TYPES, TYPE_NUMBERS, quantization_name

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


@pytest.mark.parametrize("number", TENSOR_TYPES)
def test_blocks_are_those_of_ggml(number: int) -> None:
    entry, kind = TENSOR_TYPES[number], gguf.GGMLQuantizationType(number)
    assert (entry.name.upper(), entry.weights, entry.bytes) == (kind.name, *gguf.GGML_QUANT_SIZES[kind])
    # A copy is never smaller than what is stored; at most its scales are wider.
    assert entry.copy_bytes == 0 or 1 <= entry.copy_bytes / entry.bytes < 1.03


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_file_types_are_those_of_llama_cpp(name: str) -> None:
    kind = gguf.LlamaFileType(QUANTIZATIONS[name].file_type)
    assert kind.name in (f"MOSTLY_{name.upper()}", f"ALL_{name.upper()}")
    assert quantization_name(int(kind)) == name


@pytest.mark.parametrize("name", OFFERED)
def test_what_an_export_offers_has_exact_bits(name: str) -> None:
    entry = QUANTIZATIONS[name]
    assert sum(share for _, share in entry.matrices) == pytest.approx(1)
    blocks = {kind: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]] for kind in (*dict(entry.matrices), entry.tables)}
    bits = {kind: 8 * size / weights for kind, (weights, size) in blocks.items()}
    assert entry.file_bytes(1 << 20) == pytest.approx(2**17 * sum(share * bits[kind] for kind, share in entry.matrices), abs=1)
    assert entry.file_bytes(1 << 20, 1 << 20) == pytest.approx(2**17 * bits[entry.tables], abs=1)


def test_bits_of_mixed_files() -> None:
    assert [QUANTIZATIONS[name].file_bytes(80_000) for name in ("q4_0", "q4_k_m", "q5_k_m")] == [45_000, 51_187, 57_125]


def test_other_files_are_mixed() -> None:
    assert [quantization_name(number) for number in (999, None, [1])] == [MIXED] * 3
    assert TYPE_NUMBERS["f32"] == 0
