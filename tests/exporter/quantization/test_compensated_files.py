"""Compensated files: the same layout, other levels, and matrices that lie on a grid untouched, in GGUF and in ONNX data."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
pytest.importorskip("torch", reason="tiny checkpoints are made with torch")

from edge_export.checkpoint.checkpoint import Checkpoint, open_checkpoint
from edge_export.checkpoint.safetensors import read_values
from edge_export.gguf.keys import gguf_name
from edge_export.gguf.writer import write_gguf
from edge_export.onnx.block_quantization import WeightSpec
from edge_export.onnx.weights import WeightFile, WeightFormat
from edge_export.quantization.gguf_quantization import compensate_gguf, quantize_gguf
from edge_export.quantization.importance import Importance, SecondMoments
from edge_runtime.bundle.manifest import ImportanceSource

Folders = Callable[[str], Path]
ON_GRID = "model.layers.1.self_attn.q_proj.weight"
NAMES = [f"model.layers.{layer}.{name}_proj.weight" for layer in range(2) for name in ("self_attn.q", "self_attn.o", "mlp.gate", "mlp.up")]
SOURCE = ImportanceSource(kind="calibration", name="made", bytes=1, sha256="0")


@pytest.fixture
def checkpoint(copy: Folders) -> Checkpoint:
    """A member with one matrix whose weights are levels times 2^-6, in blocks of 32."""
    from safetensors.torch import load_file, save_file

    folder = copy("e2b-text")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    levels = np.random.default_rng(0).integers(-8, 8, tuple(tensors[ON_GRID].shape))
    tensors[ON_GRID] = tensors[ON_GRID].new_tensor(levels / 64)
    save_file(tensors, path, metadata={"format": "pt"})
    return open_checkpoint(folder)


@pytest.fixture
def importance(checkpoint: Checkpoint, tmp_path: Path) -> Importance:
    """Importance and moments of inputs that share a few directions, for NAMES."""
    moments, values = SecondMoments(tmp_path / "moments"), {}
    for name in NAMES:
        columns = checkpoint.tensors[name].shape[1]
        random = np.random.default_rng(columns)
        rows = random.standard_normal((300, 6)) @ random.standard_normal((6, columns)) + 0.3 * random.standard_normal((300, columns))
        products = (rows.T @ rows / 300).astype(np.float32)
        short = gguf_name(name)
        assert short is not None
        moments.add(short, products)
        values[short] = np.diag(products)[None].copy()
    return Importance(source=SOURCE, values=values, moments=moments)


def loss(importance: Importance, name: str, weights: Any, made: Any) -> float:
    assert importance.moments is not None
    factor = importance.moments.factor(gguf_name(name) or "")
    assert factor is not None
    return float((((weights - made) @ factor.root) ** 2).sum())


def tensors_of(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def test_a_gguf_has_other_levels_and_nothing_else(checkpoint: Checkpoint, importance: Importance, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama.cpp quantizes")
    plain, made = tmp_path / "plain.gguf", tmp_path / "made.gguf"
    write_gguf(checkpoint, tmp_path / "f32.gguf", "f32", lambda _: None)
    quantize_gguf(tmp_path / "f32.gguf", plain, "q4_0", 1, importance=importance)
    shutil.copy(plain, made)
    done: list[int] = []
    compensate_gguf(made, checkpoint, importance, done.append)
    before, after = tensors_of(plain), tensors_of(made)
    assert sum(done) == sum(int(tensor.n_bytes) for tensor in before.values())
    assert made.stat().st_size == plain.stat().st_size
    changed = {name for name in before if not np.array_equal(before[name].data, after[name].data)}
    assert changed == {gguf_name(name) for name in NAMES if name != ON_GRID}
    for name in NAMES:
        short, weights = gguf_name(name) or "", read_values(checkpoint.tensors[name])
        assert before[short].tensor_type == after[short].tensor_type
        values = [gguf.quants.dequantize(each[short].data, each[short].tensor_type).reshape(weights.shape) for each in (before, after)]
        item, other = (loss(importance, name, weights, each) for each in values)
        assert other == item if name == ON_GRID else other < 0.8 * item, name
    again = tmp_path / "again.gguf"
    shutil.copy(plain, again)
    compensate_gguf(again, checkpoint, importance)
    assert again.read_bytes() == made.read_bytes()
    unmeasured = tmp_path / "unmeasured.gguf"
    shutil.copy(plain, unmeasured)
    compensate_gguf(unmeasured, checkpoint, replace(importance, moments=None))
    assert unmeasured.read_bytes() == plain.read_bytes()


def test_onnx_data_has_the_same_layout(checkpoint: Checkpoint, importance: Importance, tmp_path: Path) -> None:
    format = WeightFormat(kind="blocks", spec=WeightSpec(bits=4, block=32))

    def written(name: str, value: Importance | None) -> tuple[bytes, Any]:
        path = tmp_path / "data"
        with WeightFile(path, importance=value) as file:
            matrix = file.matrix(checkpoint, [name], format)
        return path.read_bytes(), matrix

    for name in NAMES:
        weighed, made = (written(name, value) for value in (replace(importance, moments=None), importance))
        assert made[1] == weighed[1]
        assert (made[0] == weighed[0]) == (name == ON_GRID), name
        assert written(name, importance) == made
