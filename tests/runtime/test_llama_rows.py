"""Rows that ggml expands out of a mapped GGUF, against gguf-py's own dequantization of the whole tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
gguf = pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_runtime.backends.llama_library import library
from edge_runtime.backends.llama_rows import GgufRows
from edge_runtime.errors import BackendError

COUNT, WIDTH = 11, 512
NAME = "token_embd.weight"
# What llama.cpp's quantizations leave a token embedding in. gguf-py cannot make the K types: their blocks are random bytes with sound scales.
TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
SCALES = {"Q4_K": [0, 1], "Q5_K": [0, 1], "Q6_K": [104]}


def quantized(kind: Any) -> Any:
    random = np.random.default_rng(1)
    if kind.name not in SCALES:
        return gguf.quants.quantize(random.normal(size=(COUNT, WIDTH)).astype(np.float32), kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, size=(COUNT, WIDTH // block, size), dtype=np.uint8)
    for place in SCALES[kind.name]:
        blocks.view(np.float16)[..., place] = random.uniform(0.001, 0.1, size=blocks.shape[:2])
    return blocks.reshape(COUNT, -1)


def write(path: Path, kind: Any, data: Any) -> Path:
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_tensor("before", np.ones(3, np.float32))
    writer.add_tensor(NAME, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", TYPES)
def test_rows_are_bit_for_bit_gguf_s(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    data = quantized(kind)
    wanted = gguf.quants.dequantize(data, kind)
    rows = GgufRows(library(), write(tmp_path / "model.gguf", kind, data), NAME, COUNT, WIDTH)
    out = np.empty(WIDTH, np.float32)
    for row in (3, 0, COUNT - 1, 3):
        rows.read(row, out)
        assert np.array_equal(out.view(np.uint32), wanted[row].view(np.uint32))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    kind = gguf.GGMLQuantizationType.Q8_0
    return write(tmp_path / "model.gguf", kind, quantized(kind))


@pytest.mark.parametrize("row", [-1, COUNT])
def test_a_row_that_is_not_there_is_never_read(path: Path, row: int) -> None:
    with pytest.raises(BackendError, match=f"row {row}"):
        GgufRows(library(), path, NAME, COUNT, WIDTH).read(row, np.empty(WIDTH, np.float32))


def test_a_place_too_small_is_never_written(path: Path) -> None:
    with pytest.raises(BackendError, match="one of 11 rows of 512"):
        GgufRows(library(), path, NAME, COUNT, WIDTH).read(0, np.empty(WIDTH - 1, np.float32))


@pytest.mark.parametrize(
    ("tensor", "count", "width", "words"),
    [("output.weight", COUNT, WIDTH, "no tensor output.weight"), (NAME, COUNT + 1, WIDTH, "not"), (NAME, COUNT, WIDTH * 2, "not")],
)
def test_another_tensor_is_refused(path: Path, tensor: str, count: int, width: int, words: str) -> None:
    with pytest.raises(BackendError, match=words):
        GgufRows(library(), path, tensor, count, width)


def test_a_truncated_or_foreign_file_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    with pytest.raises(BackendError, match=r"is truncated|cannot read"):
        GgufRows(library(), path, NAME, COUNT, WIDTH)
    path.write_bytes(b"GGUF" + b"\xff" * 64)
    with pytest.raises(BackendError, match="cannot read"):
        GgufRows(library(), path, NAME, COUNT, WIDTH)
