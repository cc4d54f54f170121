"""Checkpoints in the layouts in which Gemma 4 was published or saved by other tools: they open, or are refused with what to do."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_export.checkpoint.checkpoint import open_checkpoint
from edge_export.checkpoint.safetensors import INDEX_NAME
from edge_export.checkpoint.sources import mixed_training, resolve_pair
from edge_export.checkpoint.tokenizer_vocabulary import CONTROL, read_vocabulary
from edge_export.errors import CheckpointError
from published_formats import MOBILE, W4A16, edit_json, put_tensors, take_tensors
from tiny_members import FULL, SLIDING, write_member

Folders = Callable[[str], Path]


def renamed(folder: Path, rename: Callable[[str], str]) -> None:
    """Saves all shards as one file, with other names."""
    put_tensors(folder, {rename(name): tensor for name, tensor in take_tensors(folder).items()})


def drop_added(folder: Path, text: str) -> None:
    """Removes a piece that occurs in no merge from a tokenizer, added or not: its id becomes a hole."""

    def change(tokenizer: dict[str, Any]) -> None:
        tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] != text]
        del tokenizer["model"]["vocab"][text]

    edit_json(folder / "tokenizer.json", change)


@pytest.mark.parametrize("half", ["e2b", "e2b-assistant"])
def test_an_added_token_that_one_half_lacks_refuses_no_pair(half: str, member_folder: Folders, copy: Folders) -> None:
    folders = {name: member_folder(name) for name in ("e2b", "e2b-assistant")}
    folders[half] = copy(half)
    whole = read_vocabulary(folders["e2b"] if half != "e2b" else folders["e2b-assistant"])
    drop_added(folders[half], "<|think|>")
    target, drafter = resolve_pair(str(folders["e2b"]), str(folders["e2b-assistant"]))
    for source in (target, drafter):
        assert source.tokenizer is not None
        assert source.tokenizer.pieces == whole.pieces
        assert source.tokenizer.types == whole.types
        assert source.tokenizer.types[whole.pieces.index("<|think|>")] == CONTROL


@pytest.mark.parametrize("half", ["e2b", "e2b-assistant"])
def test_pieces_that_both_halves_have_must_agree(half: str, member_folder: Folders, copy: Folders) -> None:
    folders = {name: member_folder(name) for name in ("e2b", "e2b-assistant")}
    folders[half] = copy(half)

    def exchange(tokenizer: dict[str, Any]) -> None:
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["e"], vocabulary["t"] = vocabulary["t"], vocabulary["e"]

    edit_json(folders[half] / "tokenizer.json", exchange)
    with pytest.raises(CheckpointError, match="their tokenizers differ, first in the piece"):
        resolve_pair(str(folders["e2b"]), str(folders["e2b-assistant"]))


def test_a_piece_that_was_not_added_may_not_be_missing(member_folder: Folders, copy: Folders) -> None:
    folder = copy("e2b-assistant")
    edit_json(folder / "tokenizer.json", lambda tokenizer: tokenizer["model"]["vocab"].pop("e"))
    with pytest.raises(CheckpointError, match=r"their tokenizers differ, first in the piece 'e' \(id None against"):
        resolve_pair(str(member_folder("e2b")), str(folder))


def test_the_layers_of_a_saved_config_are_numbered_with_zeros(tmp_path: Path) -> None:
    """transformers writes '04' and '09' where a model has more than nine layers."""
    pytest.importorskip("transformers", reason="tiny checkpoints are made with transformers")
    layers = {"num_hidden_layers": 15, "layer_types": ([SLIDING] * 4 + [FULL]) * 3, "num_kv_shared_layers": 5}
    folder = write_member("e2b-text", tmp_path / "saved", **layers)
    keys = list(json.loads((folder / "config.json").read_text())["per_layer_config"])
    assert keys == ["04", "09", "14"]
    assert open_checkpoint(folder).architecture.full_head_dim == 32


@pytest.mark.parametrize(
    ("name", "rename"),
    [
        ("e2b", lambda name: name.replace("model.language_model.", "model.language_model.model.", 1)),
        ("e2b", lambda name: name.replace("model.language_model.", "language_model.model.", 1)),
        ("e2b", lambda name: name.replace("model.language_model.", "language_model.", 1)),
        ("12b", lambda name: name.replace("model.language_model.", "model.", 1)),
        ("e2b-text", lambda name: name.replace("model.", "model.language_model.", 1)),
    ],
)
def test_old_prefixes_are_read(name: str, rename: Callable[[str], str], copy: Folders, member_folder: Folders) -> None:
    plain, folder = open_checkpoint(member_folder(name)), copy(name)
    renamed(folder, rename)
    opened = open_checkpoint(folder)
    assert opened.tensors.keys() == plain.tensors.keys()
    assert opened.architecture == plain.architecture
    # transformers does not know these names, so the reference gets the values.
    assert plain.weights is None
    assert opened.weights is not None
    value = opened.weights["model.layers.0.mlp.up_proj.weight"]()
    assert value.dtype == np.float32
    assert value.shape == opened.tensors["model.layers.0.mlp.up_proj.weight"].shape


def test_an_index_beside_a_single_file_is_not_read(copy: Folders) -> None:
    folder = copy("e2b")
    plain = open_checkpoint(folder)
    index = (folder / INDEX_NAME).read_text()
    renamed(folder, str)
    (folder / INDEX_NAME).write_text(index)
    assert open_checkpoint(folder).tensors.keys() == plain.tensors.keys()


def test_the_first_name_of_the_experts_size_is_read(copy: Folders) -> None:
    folder = copy("26b-a4b")
    plain = open_checkpoint(folder).architecture

    def first_name(config: dict[str, Any]) -> None:
        config["text_config"]["expert_intermediate_size"] = config["text_config"].pop("moe_intermediate_size")

    edit_json(folder / "config.json", first_name)
    assert open_checkpoint(folder).architecture == plain


def test_a_list_of_templates_gives_its_default(copy: Folders) -> None:
    folder = copy("e2b")
    (folder / "chat_template.jinja").unlink()
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    edit_json(folder / "tokenizer_config.json", lambda config: config.update(chat_template=templates))
    assert read_vocabulary(folder).chat_template == "plain"
    edit_json(folder / "tokenizer_config.json", lambda config: config.update(chat_template=templates[:1]))
    assert read_vocabulary(folder).chat_template == "tools"
    edit_json(
        folder / "tokenizer_config.json", lambda config: config.update(chat_template=[templates[0], templates[0] | {"name": "other"}])
    )
    with pytest.raises(CheckpointError, match="none of its 2 chat templates is named default"):
        read_vocabulary(folder)


def test_a_per_layer_table_of_another_vocabulary_is_refused(copy: Folders) -> None:
    folder = copy("e2b")
    edit_json(folder / "config.json", lambda config: config["text_config"].update(vocab_size_per_layer_input=500))
    with pytest.raises(CheckpointError, match="vocab_size_per_layer_input is 500, not vocab_size 512: every token needs its row"):
        open_checkpoint(folder)


def test_an_adapter_is_to_be_merged(copy: Folders, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds a PEFT adapter, not a model; merge it into its base model first"):
        open_checkpoint(tmp_path)
    merged = copy("e2b")
    (merged / "adapter_config.json").write_text("{}")
    open_checkpoint(merged)


FOREIGN = [
    ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors weights of the format 'unknown'"),
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes weights"),
    ({"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}}, "NVFP4 weights"),
    ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "NVFP4 weights"),
    ({"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}}, "FP8 weights"),
    ({"quantization_config": {"quant_method": "fp8"}}, "FP8 weights"),
    ({"quantization": {"group_size": 64, "bits": 4}}, "MLX weights"),
    ({"quantization_config": {"quant_method": "awq"}}, "AWQ weights"),
    ({"quantization_config": {"quant_method": "auto-round"}}, "AutoRound weights"),
    ({"quantization_config": {"quant_method": "torchao"}}, "torchao weights"),
    ({"quantization_config": {"quant_method": "mxfp4"}}, "MXFP4 weights"),
    ({"quantization": {"group_size": 32, "bits": 4, "mode": "nvfp4"}}, "NVFP4 weights"),
    ({"quantization_config": {"quant_method": "gptq"}}, "GPTQ weights"),
    ({"quantization_config": {"quant_method": "new"}}, "weights quantized by 'new'"),
    ({"quantization_config": 7}, "weights quantized by '7'"),
]


@pytest.mark.parametrize(("section", "words", "inner"), [*((*each, False) for each in FOREIGN), (*FOREIGN[1], True), (*FOREIGN[6], True)])
def test_other_quantized_formats_are_named(section: dict[str, Any], words: str, inner: bool, copy: Folders) -> None:
    import torch

    folder = copy("12b")
    edit_json(folder / "config.json", lambda config: (config["text_config"] if inner else config).update(section))
    tensors = take_tensors(folder)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    put_tensors(folder, tensors | {name: tensors[name].to(torch.uint8)})
    with pytest.raises(CheckpointError, match=f"{words}.*which are not read; give the unquantized checkpoint"):
        open_checkpoint(folder)


def test_the_unquantized_checkpoint_of_a_known_size_is_named(copy: Folders) -> None:
    folder = copy("12b")
    sizes = {"num_hidden_layers": 48, "hidden_size": 3840, "layer_types": None, "per_layer_config": None}
    edit_json(folder / "config.json", lambda config: (config.update(FOREIGN[-1][0]), config["text_config"].update(sizes)))
    with pytest.raises(CheckpointError, match="such as google/gemma-4-12B-it or -it-qat-q4_0-unquantized"):
        open_checkpoint(folder)


@pytest.mark.usefixtures("few_drafts")
@pytest.mark.parametrize(
    "section", [FOREIGN[1][0], {"quantization_config": {}}, {"quantization_config": MOBILE}, {"compression_config": W4A16}]
)
def test_plain_weights_are_read_beside_what_is_left_of_a_format(section: dict[str, Any], copy: Folders, export: Any) -> None:
    """A fine-tune is often merged into a quantized model and saved in full, with the old config: its tensors say what it is."""
    folder = copy("e2b")
    edit_json(folder / "config.json", lambda config: config.update(section))
    opened = open_checkpoint(folder)
    assert opened.rounding == {}
    parity = export(target=str(folder), verify=True, context=512).manifest.parity
    assert parity["unquantized"]["mean_kl"] < 0.001


def test_halves_of_different_training_are_warned_of(member_folder: Folders, tmp_path: Path) -> None:
    target, drafter = resolve_pair(str(member_folder("31b")), str(member_folder("31b-assistant")))
    trained = [dataclasses.replace(half, origin="google/gemma-4-31B-it-qat-q4_0-unquantized") for half in (target, drafter)]
    assert mixed_training(target, drafter) is None
    assert mixed_training(trained[0], trained[1]) is None
    for pair in ((trained[0], drafter), (target, trained[1])):
        assert "qat-q4_0-unquantized was trained for quantization, and" in str(mixed_training(*pair))
