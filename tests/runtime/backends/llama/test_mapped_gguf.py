"""Tensors of a mapped GGUF: their bytes are those of the file, and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
gguf = pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_runtime.backends.llama import drafter as kernel_drafter
from edge_runtime.backends.llama.drafter import MappedGguf, MappedTensor
from edge_runtime.bundle.gguf_gemma4 import check_gguf
from edge_runtime.errors import BackendError

COUNT, WIDTH = 11, 512
NAME = "token_embd.weight"
# Types of the token embedding after llama.cpp's quantization.
TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


def random_blocks(kind: Any) -> Any:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return np.random.default_rng(1).integers(0, 256, size=(COUNT, WIDTH // block * size), dtype=np.uint8)


def opened(path: Path, tensor: str = NAME, count: int = COUNT, width: int = WIDTH) -> MappedTensor:
    return MappedGguf(path).tensor(tensor, (width, count))


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
    data = random_blocks(kind)
    tensor = opened(write(tmp_path / "model.gguf", kind, data))
    assert (tensor.kind, tensor.shape) == (kind, (WIDTH, COUNT))
    assert tensor.data.tobytes() == data.tobytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    kind = gguf.GGMLQuantizationType.Q8_0
    return write(tmp_path / "model.gguf", kind, random_blocks(kind))


@pytest.mark.parametrize(
    ("tensor", "count", "width", "words"),
    [("output.weight", COUNT, WIDTH, "no tensor output.weight"), (NAME, COUNT + 1, WIDTH, "not"), (NAME, COUNT, WIDTH * 2, "not")],
)
def test_another_tensor_is_refused(path: Path, tensor: str, count: int, width: int, words: str) -> None:
    with pytest.raises(BackendError, match=words):
        opened(path, tensor, count, width)


def test_a_type_that_cannot_be_multiplied_is_refused(tmp_path: Path) -> None:
    numbers = np.zeros((COUNT, WIDTH), np.int32)
    with pytest.raises(BackendError, match="is i32, not f32"):
        opened(write(tmp_path / "model.gguf", gguf.GGMLQuantizationType.I32, numbers))


def test_a_truncated_or_foreign_file_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    with pytest.raises(BackendError, match=r"is truncated|cannot read"):
        opened(path)
    path.write_bytes(b"GGUF" + b"\xff" * 64)
    with pytest.raises(BackendError, match=r"corrupt|version"):
        opened(path)


@pytest.mark.parametrize(("left", "words"), [(-200, "was cut"), (0, "cannot be mapped")])
def test_a_file_that_is_cut_behind_its_check_is_refused(path: Path, left: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(path: Path) -> Any:
        header = check_gguf(path)
        path.write_bytes(path.read_bytes()[:left])
        return header

    monkeypatch.setattr(kernel_drafter, "check_gguf", cut)
    with pytest.raises(BackendError, match=words):
        MappedGguf(path)
