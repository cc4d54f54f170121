"""Which matrix is a model's head: the tensors of its files decide, whatever config.json says, as in transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_export.checkpoint.checkpoint import open_checkpoint
from edge_export.checkpoint.safetensors import read_values
from edge_export.errors import CheckpointError
from published_formats import edit_json, put_tensors, take_tensors

Folders = Callable[[str], Path]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def with_head(folder: Path, head: str, tied: bool) -> dict[str, Any]:
    """Stores this head: none, an equal, another one, one that differs in two rows, or the embedding as head. Returns both matrices."""
    tensors = take_tensors(folder)
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    embedding = tensors[name]
    other = embedding.flip(0).contiguous()
    if head == "two rows":
        other = embedding.clone()
        other[[5, 300]] = embedding[[300, 5]]
    if head != "none":
        tensors[HEAD] = embedding.clone() if head in ("equal", "alone") else other
    if head == "alone":
        del tensors[name]
    put_tensors(folder, tensors)

    def write(config: dict[str, Any]) -> None:
        for part in (config, config.get("text_config", config)):
            part["tie_word_embeddings"] = tied

    edit_json(folder / "config.json", write)
    return {"embedding": embedding.float().numpy(), "other": other.float().numpy()}


@pytest.mark.parametrize(
    ("head", "tied", "embedding_is", "head_is"),
    [
        ("none", True, "embedding", None),
        ("none", False, "embedding", None),
        ("equal", True, "embedding", None),
        ("equal", False, "embedding", None),
        ("other", True, "embedding", "other"),
        ("other", False, "embedding", "other"),
        ("two rows", True, "embedding", "other"),
        ("alone", True, "embedding", None),
    ],
)
@pytest.mark.parametrize("member", ["e2b", "31b"])
def test_a_target(member: str, head: str, tied: bool, embedding_is: str, head_is: str | None, copy: Folders) -> None:
    folder = copy(member)
    stored = with_head(folder, head, tied)
    opened = open_checkpoint(folder)
    assert opened.architecture.tied is (head_is is None)
    np.testing.assert_array_equal(read_values(opened.tensors[EMBEDDING]), stored[embedding_is])
    if head_is is None:
        assert HEAD not in opened.tensors
    else:
        np.testing.assert_array_equal(read_values(opened.tensors[HEAD]), stored[head_is])


@pytest.mark.parametrize(("head", "head_is"), [("none", "embedding"), ("equal", "embedding"), ("other", "other"), ("alone", "embedding")])
@pytest.mark.parametrize("tied", [True, False])
def test_a_drafter_whose_embedding_is_nothing_but_its_head(head: str, head_is: str, tied: bool, copy: Folders) -> None:
    folder = copy("e2b-assistant")
    stored = with_head(folder, head, tied)
    opened = open_checkpoint(folder)
    np.testing.assert_array_equal(read_values(opened.tensors[EMBEDDING]), stored[head_is])
    assert HEAD not in opened.tensors


def test_a_head_of_another_size_is_refused(copy: Folders) -> None:
    folder = copy("e2b")
    tensors = take_tensors(folder)
    tensors[HEAD] = next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))[:500].clone()
    put_tensors(folder, tensors)
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' has shape \[500, 64\], its config requires \[512, 64\]"):
        open_checkpoint(folder)


@pytest.mark.usefixtures("few_drafts")
@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        (("other", True), ("none", True)),
        (("none", False), ("other", True)),
        (("equal", False), ("none", False)),
        (("alone", True), ("alone", True)),
    ],
)
def test_both_formats_compute_with_that_head(target: tuple[str, bool], drafter: tuple[str, bool], copy: Folders, export: Any) -> None:
    pytest.importorskip("gguf", reason="needs edge-mtp[export]")
    from edge_export.onnx.request import OnnxRequest

    folders = []
    for member, how in (("e2b", target), ("e2b-assistant", drafter)):
        folder = copy(member)
        with_head(folder, *how)
        folders.append(str(folder))
    onnx = OnnxRequest(target="f32", drafter="f32")
    bundle = export(target=folders[0], drafter=folders[1], verify=True, onnx=onnx, context=512, drafter_quantization="f16")
    for parity in (bundle.manifest.parity, bundle.manifest.parity["onnx"]):
        assert parity["unquantized"]["mean_kl"] < 0.001
        assert parity["drafts"]["unquantized_agreement"] > 0.9
