"""A config.json means here what it means in transformers, or it is refused: rotations, sizes of heads, defaults of what it leaves out."""

from __future__ import annotations

import copy as copying
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs edge-mtp[verify]")

from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from edge_export.checkpoint.architecture import FULL, SLIDING, TextArchitecture, parse_architecture
from edge_export.errors import CheckpointError

Folders = Callable[[str], Path]
FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
SLIDING_ROPE = {"rope_type": "default", "rope_theta": 1e4}


def rope(full: dict[str, Any] | None = None, sliding: dict[str, Any] | None = None, **outer: Any) -> dict[str, Any]:
    return {"rope_parameters": {FULL: FULL_ROPE if full is None else full, SLIDING: SLIDING_ROPE if sliding is None else sliding}, **outer}


READ: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no rotations": {"rope_parameters": None},
    "other bases": rope({**FULL_ROPE, "rope_theta": 5e5}, {**SLIDING_ROPE, "rope_theta": 2e4}),
    "another share": rope({**FULL_ROPE, "partial_rotary_factor": 0.5}),
    "no share": rope({"rope_type": "proportional", "rope_theta": 1e6}),
    "a share outside": rope({"rope_type": "proportional", "rope_theta": 1e6}, partial_rotary_factor=0.5),
    "both shares": rope(partial_rotary_factor=0.5),
    "both bases": rope(rope_theta=7e4),
    "full layers of the default type": rope({"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}),
    "full layers without a type": rope({"rope_theta": 1e6}),
    "the type by its old name": rope({"type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}, {"rope_theta": 1e4}),
    "a factor of one": rope({**FULL_ROPE, "factor": 1.0}),
    "a share of sliding layers": rope(None, {**SLIDING_ROPE, "partial_rotary_factor": 0.5}),
    "old names beside": {"rope_theta": 5.0, "rope_local_base_freq": 7.0},
    "no heads of full layers": {"global_head_dim": "missing"},
    "K/V heads of full layers": {"num_global_key_value_heads": 2, "attention_k_eq_v": True},
    "K/V heads that do not count": {"num_global_key_value_heads": 2, "attention_k_eq_v": False},
    "no layer types": {"layer_types": None},
    **{
        f"no {name}": {name: "missing"}
        for name in """
            head_dim num_attention_heads num_key_value_heads hidden_size intermediate_size sliding_window
            max_position_embeddings rms_norm_eps num_kv_shared_layers final_logit_softcapping hidden_activation
            attention_bias use_double_wide_mlp enable_moe_block vocab_size_per_layer_input attention_k_eq_v
        """.split()
    },
}
REFUSED = {
    "scaled": rope({**FULL_ROPE, "factor": 8.0}),
    "yarn": rope({**FULL_ROPE, "rope_type": "yarn", "factor": 4.0}),
    "linear": rope(None, {**SLIDING_ROPE, "rope_type": "linear", "factor": 2.0}),
    "sliding layers that rotate a share": rope(None, {**FULL_ROPE}),
    "no base": rope({"rope_type": "proportional"}),
    "a base outside": rope({"rope_type": "proportional"}, {"rope_type": "default"}, rope_theta=7e4),
    "one kind alone": {"rope_parameters": {FULL: FULL_ROPE}},
    "not by kinds": {"rope_parameters": FULL_ROPE},
    "overrides of something else": {"per_layer_config": {"5": {"head_dim": 32, "rms_norm_eps": 0.5}}, "global_head_dim": "missing"},
    "attention to all": {"use_bidirectional_attention": "all"},
}


def written(member_folder: Folders, changes: dict[str, Any]) -> dict[str, Any]:
    config = copying.deepcopy(json.loads((member_folder("31b") / "config.json").read_text()))
    text: dict[str, Any] = config.get("text_config", config) | {"model_type": "gemma4_text"}
    if "per_layer_config" not in changes:  # as published, where the sizes of full layers are said by keys
        text = {name: value for name, value in text.items() if name != "per_layer_config"}
        text |= {"global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    return {name: value for name, value in (text | changes).items() if value != "missing"}


def rotations(model: TextArchitecture, kind: str) -> np.ndarray:
    """The rotation of each pair of values of a head, as float64."""
    share, head_dim = (model.full_rotary_share, model.full_head_dim) if kind == FULL else (1.0, model.head_dim)
    pairs = np.arange(head_dim // 2)
    turns = (model.full_rope_base if kind == FULL else model.sliding_rope_base) ** (-2.0 * pairs / head_dim)
    return np.where(pairs < int(share * head_dim // 2), turns, 0.0)


@pytest.mark.parametrize("changes", READ.values(), ids=READ)
def test_a_config_means_what_it_means_in_transformers(changes: dict[str, Any], member_folder: Folders) -> None:
    config = written(member_folder, changes)
    ours, theirs = parse_architecture(config, Path("config.json")), Gemma4TextConfig(**copying.deepcopy(config))
    assert ours.layer_types == tuple(theirs.layer_types)
    sizes = [(theirs.per_layer_config[kind].head_dim, theirs.per_layer_config[kind].num_key_value_heads) for kind in theirs.layer_types]
    assert [(ours.head_dim_of(layer), ours.kv_heads_of(layer)) for layer in range(ours.layers)] == sizes
    assert (ours.hidden_size, ours.intermediate_size, ours.heads) == (
        theirs.hidden_size,
        theirs.intermediate_size,
        theirs.num_attention_heads,
    )
    assert (ours.window, ours.context, ours.vocab_size) == (theirs.sliding_window, theirs.max_position_embeddings, theirs.vocab_size)
    assert (ours.norm_epsilon, ours.logit_softcap) == (theirs.rms_norm_eps, theirs.final_logit_softcapping)
    assert (ours.kv_shared_layers, ours.k_eq_v, ours.double_wide) == (
        theirs.num_kv_shared_layers,
        theirs.attention_k_eq_v,
        theirs.use_double_wide_mlp,
    )
    rotary = Gemma4TextRotaryEmbedding(theirs)
    for kind in sorted(set(ours.layer_types)):
        np.testing.assert_allclose(rotations(ours, kind), getattr(rotary, f"{kind}_inv_freq").numpy(), rtol=1e-6)


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED)
def test_what_is_not_computed_here_is_refused(changes: dict[str, Any], member_folder: Folders) -> None:
    with pytest.raises(CheckpointError, match=r"^config.json: .*use an unmodified Gemma 4 config$"):
        parse_architecture(written(member_folder, changes), Path("config.json"))
