"""The split drafter's two files: the body keeps the drafter's own blocks, the head holds what its formulas say, and bundles have both or none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

from edge_export.checkpoint import Checkpoint, open_checkpoint
from edge_export.errors import CheckpointError, ExportError
from edge_export.export import ExportRequest, export_pair
from edge_export.gguf_file import write_gguf
from edge_export.quantize import quantize_gguf
from edge_export.split_body import DUMMY_VOCABULARY, write_body
from edge_export.split_head import head_bytes, write_head
from edge_runtime.backends.head_file import read_head
from silent import Silent

Folders = Callable[[str], Path]
ASSISTANTS = ["e2b-assistant", "e4b-assistant"]


def values(folder: Path) -> dict[str, Any]:
    """All tensors of a checkpoint as numpy arrays, floats as float32."""
    from safetensors.torch import load_file

    stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return {name: (t.float() if t.is_floating_point() else t).numpy() for name, t in stored.items()}


def read(drafter: Checkpoint, path: Path) -> Any:
    model = drafter.assistant
    return read_head(path, hidden_size=model.hidden_size, target_hidden_size=model.target_hidden_size, vocabulary=model.vocab_size)


@pytest.mark.parametrize("name", ASSISTANTS)
def test_the_head_holds_what_its_formulas_say(member_folder: Folders, tmp_path: Path, name: str) -> None:
    drafter, weights, told = open_checkpoint(member_folder(name)), values(member_folder(name)), []
    write_head(drafter, tmp_path / "head", told.append)
    head, model = read(drafter, tmp_path / "head"), drafter.assistant
    rows = head.rows if head.rows.dtype == np.float32 else (head.rows.astype(np.uint32) << 16).view(np.float32)
    assert (head.rows.dtype == np.uint16) == (name == "e2b-assistant"), "bfloat16 stays bfloat16"
    order = weights["masked_embedding.token_ordering"]
    assert np.array_equal(head.token_ordering.reshape(-1), order)
    assert np.array_equal(rows.reshape(-1, model.hidden_size), weights["model.embed_tokens.weight"][order])
    assert np.array_equal(head.centroids, weights["masked_embedding.centroids.weight"])
    both = np.concatenate([head.embedding_projection, head.hidden_projection], axis=1)
    assert np.array_equal(both, weights["pre_projection.weight"])
    np.testing.assert_allclose(head.feedback, head.hidden_projection @ weights["post_projection.weight"], rtol=1e-4, atol=1e-4)
    assert head.top_centroids == model.top_centroids
    assert 0 <= (tmp_path / "head").stat().st_size - sum(told) < 1024
    assert (tmp_path / "head").stat().st_size == pytest.approx(head_bytes(drafter), abs=1024)


def spoiled(folder: Path, to: Path, change: Callable[[Any], Any]) -> Checkpoint:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    tensors["masked_embedding.token_ordering"] = change(tensors["masked_embedding.token_ordering"])
    save_file(tensors, to / "model.safetensors")
    return open_checkpoint(to)


@pytest.mark.parametrize("wrong", [-1, 512, 1 << 40])
def test_an_order_that_is_none_is_refused(member_folder: Folders, tmp_path: Path, wrong: int) -> None:
    def change(order: Any) -> Any:
        order[7] = wrong
        return order

    drafter = spoiled(member_folder("e4b-assistant"), tmp_path / "spoiled", change)
    with pytest.raises(CheckpointError, match="does not name every token once"):
        write_head(drafter, tmp_path / "head")


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
    embedding, row = np.random.default_rng(1).normal(size=(2, target)).astype(np.float32)
    assert np.array_equal(ours["nextn.pre_projection.weight"].data @ np.concatenate([embedding, row]), row[:hidden])
    passed = ours["nextn.post_projection.weight"].data @ row[:hidden]
    assert np.array_equal(passed[:hidden], row[:hidden])
    assert not passed[hidden:].any()
    assert ours["token_embd.weight"].data.shape == (DUMMY_VOCABULARY, hidden)
    keys = {key: field.contents() for key, field in body.fields.items()}
    assert keys["tokenizer.ggml.model"] == "none"
    assert keys["gemma4-assistant.vocab_size"] == DUMMY_VOCABULARY
    for key, field in source.fields.items():
        if key.startswith("gemma4-assistant."):
            assert keys[key] == field.contents(), key


def test_a_body_of_something_else_is_refused_and_leaves_nothing(member_folder: Folders, finished: tuple[Checkpoint, Path]) -> None:
    folder = finished[1].parent
    write_gguf(open_checkpoint(member_folder("e2b-text")), folder / "target.gguf", "bf16", lambda _: None)
    with pytest.raises(ExportError, match=r"lacks nextn.post_projection.weight, nextn.pre_projection.weight"):
        write_body(finished[0], folder / "target.gguf", folder / "body.gguf")
    assert not (folder / "body.gguf").exists()


def exported(member_folder: Folders, tmp_path: Path, target: str, drafter: str) -> Any:
    request = ExportRequest(
        target=str(member_folder(target)), drafter=drafter, output=tmp_path / "out", target_quantization="bf16", verify=False,
        drafter_quantization="bf16" if Path(drafter).is_dir() else None,
    )  # fmt: skip
    return export_pair(request, Silent())


def test_a_bundle_of_a_pair_with_ordered_embeddings_has_both(member_folder: Folders, tmp_path: Path) -> None:
    bundle = exported(member_folder, tmp_path, "e2b", str(member_folder("e2b-assistant")))
    found = {file.role: (file.format, file.quantization) for file in bundle.manifest.files}
    assert found["drafter_body"] == ("gguf", "bf16")
    assert found["drafter_head"] == ("safetensors", "bf16")
    assert not any("masked_embedding" in name for name in bundle.manifest.left_out), "the head carries it"


def test_a_bundle_without_ordered_embeddings_has_none(member_folder: Folders, tmp_path: Path) -> None:
    bundle = exported(member_folder, tmp_path, "31b", str(member_folder("31b-assistant")))
    assert not bundle.has("drafter_body")
    assert not bundle.has("drafter_head")


def test_a_drafter_that_came_as_gguf_has_no_head_to_take(member_folder: Folders, tmp_path: Path, finished: tuple[Checkpoint, Path]) -> None:
    bundle = exported(member_folder, tmp_path, "e2b", str(finished[1]))
    assert not bundle.has("drafter_head")
