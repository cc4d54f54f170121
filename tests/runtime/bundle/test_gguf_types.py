"""The table of GGUF types, against the gguf package, which follows llama.cpp's headers."""

from __future__ import annotations

import pytest

gguf = pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_runtime.bundle.gguf_header import MIXED, OFFERED, QUANTIZATIONS, TENSOR_TYPES, TYPE_NUMBERS, quantization_name


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
