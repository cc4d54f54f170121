"""Broken and hostile checkpoints are refused with a sentence; sound pairs get the right cache layout."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_export.checkpoint.checkpoint import check_pair, open_checkpoint
from edge_export.checkpoint.safetensors import INDEX_NAME, StoredTensor, read_values
from edge_export.checkpoint.sources import resolve_pair
from edge_export.errors import CheckpointError
from edge_export.pipeline.bundle_files import architecture, cache_layout
from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from kept import PAIR
from published_formats import edit_json, put_tensors, take_tensors

Folders = Callable[[str], Path]


def edit_config(folder: Path, *, text: bool = False, **changes: Any) -> None:
    edit_json(folder / "config.json", lambda config: (config["text_config"] if text else config).update(changes))


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


EMBEDDING = "model.embed_tokens.weight"
UNSOUND = "is no sound safetensors file or is truncated"
# Further damage: the reader "safetensors" of tests/fuzz.
HEADER_DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "past end": (lambda h: h[EMBEDDING].update(data_offsets=[0, 1 << 50]), UNSOUND),
    "digits": (lambda h: h[EMBEDDING].update(data_offsets=[0, 10**4300 - 1]), UNSOUND),
    "misshapen": (lambda h: h["model.norm.weight"].update(shape=[8, 8]), r"shape \[8, 8\], its config requires \[64\]"),
    "integers": (lambda h: h["model.norm.weight"].update(dtype="I32"), "is I32, not F32 or F16 or BF16"),
}


@pytest.mark.parametrize("kind", HEADER_DAMAGE)
def test_damaged_header(kind: str, copy: Folders) -> None:
    folder = copy("e2b-text")
    change, message = HEADER_DAMAGE[kind]
    rewrite_header(folder / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert len(str(caught.value)) < 600


def test_other_tensors_than_the_config_says_are_named(copy: Folders) -> None:
    folder = copy("e2b-text")
    tensors = take_tensors(folder)
    put_tensors(folder, tensors | {"model.layers.0.extra.weight": tensors["model.norm.weight"].clone()})
    with pytest.raises(CheckpointError, match=r"'model.layers.0.extra.weight' is not a tensor of the model"):
        open_checkpoint(folder)
    del tensors["model.layers.3.layer_scalar"]
    put_tensors(folder, tensors)
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'model.layers.3.layer_scalar' \[1\]"):
        open_checkpoint(folder)


def test_missing_and_truncated_shards(copy: Folders) -> None:
    folder = copy("e2b")
    shard = folder / "model-00004-of-00009.safetensors"
    data = shard.read_bytes()
    for length in (0, len(data) - 10):
        shard.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=rf"model-00004-of-00009\.safetensors {UNSOUND}"):
            open_checkpoint(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"model-00004-of-00009\.safetensors is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "model.gguf"])
def test_a_git_lfs_pointer_is_named(name: str, copy: Folders) -> None:
    folder = copy("31b")
    (folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n")
    target = folder / name if name.endswith("gguf") else folder
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} is a git-lfs pointer, not the file itself; run git lfs pull"):
        resolve_pair(str(target), str(copy("31b-assistant")))


@pytest.mark.parametrize(("dtype", "bits"), [("F32", "<u4"), ("F16", "<u2"), ("BF16", "<u2")])
@pytest.mark.parametrize("sign", [0, 1])
def test_a_value_that_is_no_number_is_named(dtype: str, bits: str, sign: int, tmp_path: Path) -> None:
    infinity = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}[dtype]
    minus = sign << (8 * np.dtype(bits).itemsize - 1)
    for value, word in ((infinity, "infinity"), (infinity + 1, "NaN"), (infinity - 1, None)):
        values = np.array([0, minus | value, minus], bits)
        (tmp_path / "x").write_bytes(values.tobytes())
        tensor = StoredTensor(name="a.weight", path=tmp_path / "x", dtype=dtype, shape=(3,), offset=0, bytes=values.nbytes)
        if word is None:
            assert np.isfinite(read_values(tensor)).all()
            continue
        with pytest.raises(CheckpointError, match=f"x: tensor 'a.weight' holds {word}"):
            read_values(tensor)
    bound = StoredTensor(name="bound", path=tmp_path / "x", dtype=dtype, shape=(), offset=0, bytes=values.itemsize)
    (tmp_path / "x").write_bytes(np.array(minus | infinity, bits).tobytes())
    assert np.isinf(read_values(bound)).all()


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "a\\b.safetensors", "config.json", ""])
def test_shard_paths_stay_in_the_folder(shard: str, copy: Folders) -> None:
    folder = copy("e2b")
    edit_json(folder / INDEX_NAME, lambda index: index["weight_map"].update({next(iter(index["weight_map"])): shard}))
    with pytest.raises(CheckpointError, match="not a safetensors file of this folder"):
        open_checkpoint(folder)


def test_index_and_shards_must_agree(copy: Folders) -> None:
    folder = copy("e2b")
    ghost = {"model.language_model.ghost.weight": "model-00001-of-00009.safetensors"}
    edit_json(folder / INDEX_NAME, lambda index: index["weight_map"].update(ghost))
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'model\.language_model\.ghost\.weight'"):
        open_checkpoint(folder)


NO_NUMBERS = (10**400, float("inf"), float("nan"), 1e300, -1)


def rope(theta: float) -> dict[str, Any]:
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": theta}
    return {"full_attention": full, "sliding_attention": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        (False, {"model_type": "gemma3"}, "model_type is 'gemma3'"),
        (False, {"model_type": ["gemma4"]}, "model_type is"),
        (True, {"hidden_size": "64"}, "hidden_size is '64'"),
        (True, {"hidden_size": 1 << 40}, "hidden_size is"),
        (True, {"num_hidden_layers": 10**9}, "num_hidden_layers is"),
        (True, {"num_hidden_layers": 9}, "layer_types is"),
        (True, {"layer_types": ["full_attention"] * 7 + ["sliding_attention"]}, "layer_types is"),
        (True, {"num_kv_shared_layers": 3}, "the last layers that own K/V"),
        (True, {"num_key_value_heads": 3}, "do not divide"),
        (True, {"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        *((True, {key: value}, f"{key} is") for key in ("rms_norm_eps", "final_logit_softcapping") for value in NO_NUMBERS),
        *((True, {"rope_parameters": rope(value)}, "rope_theta is") for value in NO_NUMBERS),
        (True, {"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        (True, {"hidden_size": 32}, "config requires"),
        (True, {"per_layer_config": {"0": {"head_dim": 32}}}, "not overrides of the full-attention layers 3, 7"),
        (True, {"per_layer_config": {"3": {"head_dim": 32}, "7": {"head_dim": 64}}}, "not the same for all"),
        (True, {"per_layer_config": {"3": {"num_key_value_heads": []}, "7": {"num_key_value_heads": []}}}, "num_key_value_heads is"),
    ],
)
def test_wrong_config(text: bool, changes: dict[str, Any], message: str, copy: Folders) -> None:
    folder = copy("e2b")
    edit_config(folder, text=text, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="is not JSON"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["e2b", "12b", "26b-a4b", "31b-assistant"])
def test_both_config_forms_say_the_same(name: str, copy: Folders) -> None:
    folder = copy(name)
    published = open_checkpoint(folder).architecture
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    override = {"head_dim": text.pop("global_head_dim")}
    count = text.pop("num_global_key_value_heads")
    override |= {"num_key_value_heads": count} if count is not None else {}
    text["per_layer_config"] = {str(i): override for i, kind in enumerate(text["layer_types"]) if kind == "full_attention"}
    del text["moe_intermediate_size" if not text.get("enable_moe_block") else "use_cache"]
    (folder / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(folder).architecture == published


def test_left_out_names_towers_and_centroids(member_folder: Folders) -> None:
    assert open_checkpoint(member_folder("e2b")).left_out == (
        "audio_tower: 1 tensors, 64 bytes",
        "embed_vision: 1 tensors, 1024 bytes",
        "vision_tower: 2 tensors, 320 bytes",
    )
    assert open_checkpoint(member_folder("e2b-assistant")).left_out == ("masked_embedding: 2 tensors, 7168 bytes",)
    assert open_checkpoint(member_folder("e2b-text")).left_out == ()


E_OWNERS, LARGE_OWNERS = (0, 1, 2, 3, 2, 2, 2, 3), (0, 1, 2, 3, 4, 5)
# owners of target layers, sources of drafter layers, (K/V heads, head dim) of sliding and of full rows
LAYOUTS = {
    "e2b": (E_OWNERS, (2, 2, 2, 3), (1, 16), (1, 32)),
    "e4b": (E_OWNERS, (2, 2, 2, 3), (2, 16), (2, 32)),
    "12b": (LARGE_OWNERS, (4, 4, 4, 5), (4, 16), (1, 32)),
    "26b-a4b": (LARGE_OWNERS, (4, 4, 4, 5), (4, 16), (2, 32)),
    "31b": (LARGE_OWNERS, (4, 4, 4, 5), (4, 16), (1, 32)),
}


@pytest.mark.parametrize("target", LAYOUTS)
def test_cache_layout(target: str, member_folder: Folders) -> None:
    pair = open_checkpoint(member_folder(target)), open_checkpoint(member_folder(f"{target}-assistant"))
    layout = cache_layout(*pair, context=512)
    owners, sources, sliding, full = LAYOUTS[target]
    assert (layout.layer_owners, layout.drafter_sources, layout.rewind_slack) == (owners, sources, MAX_DRAFT_LENGTH)
    assert layout.sliding is not None
    assert (layout.sliding.kv_heads, layout.sliding.head_dim) == sliding
    assert (layout.sliding.window, layout.sliding.capacity) == (32, 256)
    assert (layout.full.kv_heads, layout.full.head_dim, layout.full.window, layout.full.capacity) == (*full, None, 512)
    assert set(layout.sliding.owner_layers) | set(layout.full.owner_layers) == set(owners)
    facts = architecture(*pair, context=512)
    assert (facts.family, facts.hidden_size, facts.drafter_hidden_size, facts.drafter_layers) == ("custom", 64, 48, 4)
    assert facts.ordered_embeddings is (target in ("e2b", "e4b"))


def test_prompt_parameters_are_those_that_keys_and_values_need(member_folder: Folders) -> None:
    """By hand: three layers of the shipped target, K and V of the fourth, which the other four read, and 3/8 of the joint projection."""
    pair = (open_checkpoint(PAIR / half) for half in ("target", "drafter"))
    attention, feed_forward, per_layer = 2 * 256 * 4 * 64 + 2 * 256 * 64, 3 * 256 * 512, 2 * 256 * 32
    needed = 3 * (attention + feed_forward + per_layer) + 2 * 256 * 128 + 256 * 8 * 32 * 3 // 8
    assert architecture(*pair, context=512).prompt_parameters == needed
    target, drafter = open_checkpoint(member_folder("26b-a4b")), open_checkpoint(member_folder("26b-a4b-assistant"))
    sizes = {name: int(np.prod(tensor.shape)) for name, tensor in target.tensors.items() if len(tensor.shape) > 1}
    counted = sum(size for name, size in sizes.items() if re.search(r"layers\.([0-4]\.|5\.self_attn\.[kv]_proj)", name))
    unused = 5 * 2 * 3 * 64 * 24  # in each of 5 layers 2 of 4 experts, of 3 matrices each
    assert architecture(target, drafter, context=512).prompt_parameters == counted - unused


def test_context_must_fit(member_folder: Folders) -> None:
    pair = open_checkpoint(member_folder("12b")), open_checkpoint(member_folder("12b-assistant"))
    for context in (0, 1025):
        with pytest.raises(CheckpointError, match=rf"context {context} is not in 1\.\.1024"):
            cache_layout(*pair, context=context)


@pytest.mark.parametrize(
    ("target", "drafter", "message"),
    [
        ("12b", "e2b-assistant", "K/V heads"),
        ("e4b", "e2b-assistant", "K/V heads is 1, the target's K/V heads is 2"),
        ("26b-a4b", "31b-assistant", "full_attention K/V heads is 1, the target's K/V heads is 2"),
    ],
)
def test_mismatched_pairs(target: str, drafter: str, message: str, member_folder: Folders) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_pair(open_checkpoint(member_folder(target)), open_checkpoint(member_folder(drafter)))


def test_mismatched_sizes_and_tokenizers(member_folder: Folders, tmp_path: Path) -> None:
    from tiny_members import MEMBERS, write_member

    target = open_checkpoint(member_folder("12b"))
    narrow = write_member("12b-assistant", tmp_path / "head", global_head_dim=64)
    with pytest.raises(CheckpointError, match="full_attention head_dim is 64, the target's head_dim is 32"):
        check_pair(target, open_checkpoint(narrow))
    equal = write_member("12b-assistant", tmp_path / "equal", hidden_size=MEMBERS["12b"].text["hidden_size"])
    with pytest.raises(CheckpointError, match="both have hidden_size 64"):
        check_pair(target, open_checkpoint(equal))
    other = Path(shutil.copytree(member_folder("12b-assistant"), tmp_path / "other"))
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace('"<|think|>"', '"<|thunk|>"'))
    with pytest.raises(CheckpointError, match="their tokenizers differ, first in the piece '<|think|>'".replace("|", r"\|")):
        resolve_pair(str(member_folder("12b")), str(other))


@pytest.mark.parametrize("window", [16, 64])
def test_a_drafter_of_another_window_is_refused(window: int, copy: Folders) -> None:
    target, drafter = open_checkpoint(copy("e2b")), copy("e2b-assistant")
    check_pair(target, open_checkpoint(drafter))
    edit_config(drafter, text=True, sliding_window=window)
    message = (
        rf"is not the assistant of .*: its sliding_window is {window}, the target's is 32, and both runtimes use the target's for both;"
    )
    with pytest.raises(CheckpointError, match=message):
        check_pair(target, open_checkpoint(drafter))
