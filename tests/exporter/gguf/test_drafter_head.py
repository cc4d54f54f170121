"""The file of the sparse head: the drafter's rows in the order of centroids."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")


from edge_export.checkpoint.checkpoint import Checkpoint, open_checkpoint
from edge_export.errors import CheckpointError
from edge_export.gguf.writer import head_bytes, write_gguf, write_head
from edge_export.quantization.gguf_quantization import quantize_gguf

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
def test_the_head_holds_the_drafters_rows_and_centroids(member_folder: Folders, tmp_path: Path, name: str, quantization: str) -> None:
    drafter, weights, reported = open_checkpoint(member_folder(name)), values(member_folder(name)), []
    finished, model = finished_as(drafter, tmp_path, quantization), drafter.assistant
    write_head(drafter, finished, tmp_path / "head", reported.append)
    head = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "head").tensors}
    (dense,) = (tensor for tensor in gguf.GGUFReader(finished).tensors if tensor.name == "token_embd.weight")
    order = weights["masked_embedding.token_ordering"]
    assert np.array_equal(head["token_ordering"].data.reshape(-1), order)
    assert head["rows"].tensor_type == dense.tensor_type
    assert list(head["rows"].shape) == [model.hidden_size, len(order) // model.centroids, model.centroids]
    bytes_of_rows = dense.data.view(np.uint8).reshape(len(order), -1)
    assert np.array_equal(head["rows"].data.view(np.uint8).reshape(len(order), -1), bytes_of_rows[order])
    assert np.array_equal(head["centroids"].data, weights["masked_embedding.centroids.weight"].astype(np.float16))
    keys = {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / "head").fields.items()}
    assert keys["drafter_head.format"] == 3
    assert keys["drafter_head.top_centroids"] == model.top_centroids
    assert (tmp_path / "head").stat().st_size == sum(reported) == pytest.approx(head_bytes(drafter, bytes_of_rows.shape[1]), abs=1024)


@pytest.mark.parametrize(
    ("name", "place", "wrong", "words"),
    [
        ("masked_embedding.centroids.weight", (3, 1), 1e6, "centroids holds values beyond float16"),
        *(("masked_embedding.token_ordering", 7, wrong, "does not name every token once") for wrong in (-1, 512, 1 << 40)),
    ],
)
def test_values_that_no_head_has_are_refused(
    name: str, place: Any, wrong: float, words: str, member_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(member_folder("e4b-assistant"), tmp_path / "spoiled"))
    tensors = load_file(folder / "model.safetensors")
    tensors[name][place] = wrong
    save_file(tensors, folder / "model.safetensors")
    drafter = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=words):
        write_head(drafter, finished_as(drafter, tmp_path, "bf16"), tmp_path / "head")
    assert not (tmp_path / "head").exists()
