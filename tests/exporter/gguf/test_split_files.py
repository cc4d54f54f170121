"""The two files of the split drafter: the body keeps the drafter's blocks, the head follows its formulas."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")


from edge_export.checkpoint.checkpoint import Checkpoint, open_checkpoint
from edge_export.errors import CheckpointError, ExportError
from edge_export.gguf.split_drafter import head_bytes, write_body, write_head
from edge_export.gguf.writer import write_gguf
from edge_export.quantization.llama_quantize import quantize_gguf

Folders = Callable[[str], Path]
ASSISTANTS = ["e2b-assistant", "e4b-assistant"]


def values(folder: Path) -> dict[str, Any]:
    """All tensors of a checkpoint as numpy arrays, floats as float32."""
    from safetensors.torch import load_file

    stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return {name: (t.float() if t.is_floating_point() else t).numpy() for name, t in stored.items()}


def finished_as(drafter: Checkpoint, folder: Path, quantization: str) -> Path:
    """The drafter's GGUF as it goes into a bundle."""
    write_gguf(drafter, folder / "bf16.gguf", "bf16", lambda _: None)
    if quantization != "bf16":
        pytest.importorskip("llama_cpp", reason="quantizes with llama.cpp")
        quantize_gguf(folder / "bf16.gguf", folder / f"{quantization}.gguf", quantization, 1)
    return folder / f"{quantization}.gguf"


@pytest.mark.parametrize("quantization", ["bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", ASSISTANTS)
def test_the_head_holds_what_its_formulas_say(member_folder: Folders, tmp_path: Path, name: str, quantization: str) -> None:
    drafter, weights, told = open_checkpoint(member_folder(name)), values(member_folder(name)), []
    finished, model = finished_as(drafter, tmp_path, quantization), drafter.assistant
    write_head(drafter, finished, tmp_path / "head", told.append)
    head = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "head").tensors}
    (dense,) = (tensor for tensor in gguf.GGUFReader(finished).tensors if tensor.name == "token_embd.weight")
    order = weights["masked_embedding.token_ordering"]
    assert np.array_equal(head["token_ordering"].data.reshape(-1), order)
    assert head["rows"].tensor_type == dense.tensor_type
    assert list(head["rows"].shape) == [model.hidden_size, len(order) // model.centroids, model.centroids]
    bytes_of_rows = dense.data.view(np.uint8).reshape(len(order), -1)
    assert np.array_equal(head["rows"].data.view(np.uint8).reshape(len(order), -1), bytes_of_rows[order])
    halves = np.split(weights["pre_projection.weight"], 2, axis=1)
    feedback = halves[1].astype(np.float64) @ weights["post_projection.weight"]
    wanted = {"centroids": weights["masked_embedding.centroids.weight"], "embedding_projection": halves[0], "hidden_projection": halves[1]}
    for matrix, numbers in (wanted | {"feedback": feedback}).items():
        assert np.array_equal(head[matrix].data, numbers.astype(np.float16)), matrix
    keys = {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / "head").fields.items()}
    assert keys["drafter_head.format"] == 2
    assert keys["drafter_head.top_centroids"] == model.top_centroids
    assert (tmp_path / "head").stat().st_size == sum(told) == pytest.approx(head_bytes(drafter, bytes_of_rows.shape[1]), abs=1024)


def test_values_beyond_float16_are_refused(member_folder: Folders, tmp_path: Path) -> None:
    def change(centroids: Any) -> Any:
        centroids[3, 1] = 1e6
        return centroids

    drafter = spoiled(member_folder("e4b-assistant"), tmp_path / "spoiled", change, "masked_embedding.centroids.weight")
    with pytest.raises(CheckpointError, match="centroids holds values beyond float16"):
        write_head(drafter, finished_as(drafter, tmp_path, "bf16"), tmp_path / "head")
    assert not (tmp_path / "head").exists()


def spoiled(folder: Path, to: Path, change: Callable[[Any], Any], name: str = "masked_embedding.token_ordering") -> Checkpoint:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, to / "model.safetensors")
    return open_checkpoint(to)


@pytest.mark.parametrize("wrong", [-1, 512, 1 << 40])
def test_an_order_that_is_none_is_refused(member_folder: Folders, tmp_path: Path, wrong: int) -> None:
    def change(order: Any) -> Any:
        order[7] = wrong
        return order

    drafter = spoiled(member_folder("e4b-assistant"), tmp_path / "spoiled", change)
    with pytest.raises(CheckpointError, match="does not name every token once"):
        write_head(drafter, finished_as(drafter, tmp_path, "bf16"), tmp_path / "head")


@pytest.fixture
def finished(member_folder: Folders, tmp_path: Path) -> tuple[Checkpoint, Path]:
    drafter = open_checkpoint(member_folder("e2b-assistant"))
    write_gguf(drafter, tmp_path / "plain.gguf", "bf16", lambda _: None)
    return drafter, tmp_path / "plain.gguf"


def test_the_body_keeps_the_quantized_blocks_and_selects_around_them(finished: tuple[Checkpoint, Path], tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="quantizes with llama.cpp")
    drafter, plain = finished
    quantize_gguf(plain, tmp_path / "quantized.gguf", "q8_0", 1)
    told: list[int] = []
    write_body(drafter, tmp_path / "quantized.gguf", tmp_path / "body.gguf", told.append)
    assert sum(told) == (tmp_path / "body.gguf").stat().st_size
    source, body = gguf.GGUFReader(tmp_path / "quantized.gguf"), gguf.GGUFReader(tmp_path / "body.gguf")
    theirs, ours = ({tensor.name: tensor for tensor in reader.tensors} for reader in (source, body))
    assert set(ours) == set(theirs) - {name for name in theirs if name.startswith("masked_embd")}
    replaced = {"token_embd.weight", "nextn.pre_projection.weight", "nextn.post_projection.weight"}
    for name in set(ours) - replaced:
        assert (ours[name].tensor_type, list(ours[name].shape)) == (theirs[name].tensor_type, list(theirs[name].shape)), name
        assert np.array_equal(ours[name].data.view(np.uint8), theirs[name].data.view(np.uint8)), name
    hidden, target = drafter.assistant.hidden_size, drafter.assistant.target_hidden_size
    # Ones and zeros are exact in q4_0, too.
    selector = gguf.quants.dequantize(ours["nextn.pre_projection.weight"].data, gguf.GGMLQuantizationType.Q4_0)
    assert np.array_equal(selector, np.eye(hidden, 2 * target, k=target))
    assert np.array_equal(ours["token_embd.weight"].data, np.eye(hidden))
    assert not ours["nextn.post_projection.weight"].data.any()
    keys = {key: field.contents() for key, field in body.fields.items()}
    assert keys["tokenizer.ggml.model"] == "none"
    assert keys["gemma4-assistant.vocab_size"] == hidden
    for key, field in source.fields.items():
        if key.startswith("gemma4-assistant."):
            assert keys[key] == field.contents(), key


def test_a_body_of_something_else_is_refused_and_leaves_nothing(member_folder: Folders, finished: tuple[Checkpoint, Path]) -> None:
    folder = finished[1].parent
    write_gguf(open_checkpoint(member_folder("e2b-text")), folder / "target.gguf", "bf16", lambda _: None)
    with pytest.raises(ExportError, match=r"lacks nextn.post_projection.weight, nextn.pre_projection.weight"):
        write_body(finished[0], folder / "target.gguf", folder / "body.gguf")
    assert not (folder / "body.gguf").exists()
