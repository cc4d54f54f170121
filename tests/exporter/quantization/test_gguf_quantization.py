"""Quantization through llama.cpp: the files it makes, how its failures and deaths are told, and the levels and scales of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_export.checkpoint.checkpoint import open_checkpoint, quantization_of, read_gguf_header
from edge_export.checkpoint.sources import reference_pair
from edge_export.errors import ExportError
from edge_export.gguf.writer import write_gguf
from edge_export.quantization import gguf_quantization
from edge_export.quantization.gguf_quantization import BLOCK_TYPES, DIRECT, Bytes, check_quantization, quantize_gguf
from edge_runtime.bundle.gguf_header import OFFERED, QUANTIZATIONS, TENSOR_TYPES

Folders = Callable[[str], Path]
Q4_0, Q8_0 = 2, 8


@pytest.fixture
def source(member_folder: Folders, tmp_path: Path) -> Path:
    pytest.importorskip("llama_cpp", reason="llama.cpp quantizes")
    path = tmp_path / "source.gguf"
    write_gguf(open_checkpoint(member_folder("e2b-text")), path, "f32", lambda _: None)
    return path


@pytest.mark.parametrize(("quantization", "kind"), [("q8_0", Q8_0), ("q4_0", Q4_0)])
def test_matrices_get_the_type_and_progress_counts_the_file(quantization: str, kind: int, source: Path, tmp_path: Path) -> None:
    written: list[int] = []
    quantize_gguf(source, tmp_path / "out.gguf", quantization, 1, written.append)
    header = read_gguf_header(tmp_path / "out.gguf")
    types = {tensor.name: tensor.type for tensor in header.tensors}
    assert types["blk.0.attn_q.weight"] == kind
    assert quantization_of(header) == quantization
    assert sum(written) == (tmp_path / "out.gguf").stat().st_size
    before = read_gguf_header(source)
    assert {tensor.name: tensor.shape for tensor in header.tensors} == {tensor.name: tensor.shape for tensor in before.tensors}


@pytest.mark.parametrize("quantization", [name for name in OFFERED if name not in DIRECT])
def test_a_file_has_the_types_and_the_size_of_its_entry_in_the_table(quantization: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama.cpp quantizes")
    checkpoint = open_checkpoint(reference_pair()[0])
    write_gguf(checkpoint, tmp_path / "whole.gguf", "f16", lambda _: None)
    quantize_gguf(tmp_path / "whole.gguf", tmp_path / "out.gguf", quantization, 2)
    entry, header = QUANTIZATIONS[quantization], read_gguf_header(tmp_path / "out.gguf")
    stored = {tensor.name: TENSOR_TYPES[tensor.type].name for tensor in header.tensors}
    assert stored["token_embd.weight"] == stored["per_layer_token_embd.weight"] == entry.tables
    # 65,536 weights are in rows of 32, which fit no block of 256.
    matrices = {kind for name, kind in stored.items() if "embd" not in name and "inp_gate" not in name and "proj" not in name}
    assert matrices - {"f32", "f16", "bf16"} == {kind for kind, _ in entry.matrices}
    for part, kind in entry.raised:
        assert {stored[name] for name in stored if part in name} == {kind}
    size = sum(tensor.bytes for tensor in header.tensors if stored[tensor.name] != "f32")
    assert entry.file_bytes(8_421_376, checkpoint.architecture.table_weights) == pytest.approx(size, rel=0.025)


def test_every_name_is_known_and_others_are_refused() -> None:
    for quantization in OFFERED:
        check_quantization(quantization)
    with pytest.raises(ExportError, match=f"'Q4' is unknown; choose one of {', '.join(OFFERED)}"):
        check_quantization("Q4")


def test_llama_cpps_own_words_are_quoted(source: Path, tmp_path: Path) -> None:
    source.write_bytes(source.read_bytes()[:5000])
    with pytest.raises(ExportError, match=r"could not quantize source.gguf to q8_0.*: .*(gguf|read|load)"):
        quantize_gguf(source, tmp_path / "out.gguf", "q8_0", 1)


def test_a_missing_folder_is_named(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="nowhere does not exist; create it"):
        quantize_gguf(source, tmp_path / "nowhere" / "out.gguf", "q8_0", 1)


def test_a_dying_child_is_an_error(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = tmp_path / "dying"
    dying.write_text("#!/bin/sh\necho 'loading' >&2\necho 'x.c:7: GGML_ASSERT(n > 0) failed' >&2\nkill -ABRT $$\n")
    dying.chmod(0o755)
    monkeypatch.setattr(gguf_quantization.sys, "executable", str(dying))
    with pytest.raises(ExportError, match=r"\(it died of SIGABRT\): x.c:7: GGML_ASSERT"):
        quantize_gguf(source, tmp_path / "out.gguf", "q8_0", 1)


def test_the_child_ends_with_an_interrupted_parent(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping = tmp_path / "sleeping"
    sleeping.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/process\nexec sleep 600\n")
    sleeping.chmod(0o755)
    monkeypatch.setattr(gguf_quantization.sys, "executable", str(sleeping))

    def interrupted(_: int) -> None:
        if (tmp_path / "process").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_gguf(source, tmp_path / "out.gguf", "q8_0", 1, interrupted)
    process = int((tmp_path / "process").read_text())
    assert not Path(f"/proc/{process}").exists()


def made(kind: int) -> Bytes:
    """Blocks of any bytes but finite scales."""
    blocks = np.random.default_rng(kind).integers(0, 256, (100, BLOCK_TYPES[kind].bytes), dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind))).all(axis=1)
    return blocks[finite][:64]


@pytest.mark.parametrize("kind", sorted(BLOCK_TYPES))
def test_scales_and_levels_are_the_weights(kind: int) -> None:
    """As gguf's own code reads them."""
    blocks, type = made(kind), BLOCK_TYPES[kind]
    levels, (scales, offsets) = type.read_levels(blocks), type.scales(blocks)
    assert levels.shape == (64, type.weights)
    assert set(np.unique(levels)) == set(range(type.top + 1))
    weights = levels * np.repeat(scales, type.group, axis=1) + np.repeat(offsets, type.group, axis=1)
    assert np.array_equal(weights, gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind)))


@pytest.mark.parametrize("kind", sorted(BLOCK_TYPES))
def test_other_levels_leave_the_scales(kind: int) -> None:
    blocks, type = made(kind), BLOCK_TYPES[kind]
    assert np.array_equal(type.with_levels(blocks, type.read_levels(blocks)), blocks)
    other = np.random.default_rng(0).integers(0, type.top + 1, (64, type.weights), dtype=np.uint8)
    changed = type.with_levels(blocks, other)
    assert np.array_equal(type.read_levels(changed), other)
    for before, after in zip(type.scales(blocks), type.scales(changed), strict=True):
        assert np.array_equal(before, after)
