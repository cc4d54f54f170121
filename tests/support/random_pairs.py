"""Pairs of Gemma 4 shapes drawn at random, built and saved by transformers: every member, and what its config may legally vary.

`write_random_pair(seed, folder)` writes target and assistant; the same seed draws the same pair, in which values may be replaced, as by the
published sizes of heads.
The weights are scaled so that a random model's logits are no chaos: an export in another precision stays close to it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kept import kept
from tiny_members import FULL, NO_PER_LAYER, SLIDING, VOCABULARY, built_model, publish_config, write_tokenizer

FAMILIES = ("e2b", "e4b", "12b", "26b-a4b", "31b")
# Of all published members; their V has matrices of its own here, which the published ones share with K in full layers.
WIDE_HEADS = {"head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": False}


@dataclass(frozen=True, kw_only=True)
class RandomPair:
    """A drawn pair: the text configs of both halves, and how they are saved."""

    family: str
    target: dict[str, Any]
    drafter: dict[str, Any]
    ordered: bool
    multimodal: bool
    dtype: str
    published: bool

    @property
    def unified(self) -> bool:
        """Whether the classes of 12B are used."""
        return self.family == "12b"


def draw(seed: int) -> RandomPair:
    rng = random.Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    step = rng.choice([2, 3, 4, 5, 6])
    kinds = ([SLIDING] * (step - 1) + [FULL]) * rng.choice([2, 3] if step > 3 else [3, 4])
    heads = rng.choice([4, 8])
    target: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": rng.choice([64, 96, 128]),
        "intermediate_size": rng.choice([96, 160]),
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, 2, heads]),
        "head_dim": rng.choice([16, 32, 64]),
        "global_head_dim": rng.choice([32, 64, 128]),
        "sliding_window": rng.choice([16, 32, 64, 512]),
        "max_position_embeddings": rng.choice([1024, 2048]),
        "final_logit_softcapping": rng.choice([30.0, 30.0, None, 50.0]),
        "rms_norm_eps": rng.choice([1e-6, 1e-5]),
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": rng.choice([1, [1, 6]]),
        "pad_token_id": 0,
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0]),
                "rope_theta": rng.choice([1e6, 1e5]),
            },
            SLIDING: {"rope_type": "default", "rope_theta": rng.choice([1e4, 2e4])},
        },
    }
    if family.startswith("e"):
        target |= {
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": rng.choice([16, 32]),
            "num_kv_shared_layers": rng.choice([0, step, len(kinds) - 2 * step]) if len(kinds) > 2 * step else rng.choice([0, step]),
            "use_double_wide_mlp": family == "e2b",
        }
    else:
        target |= NO_PER_LAYER if family != "12b" else {}
        target |= {"num_kv_shared_layers": 0, "attention_k_eq_v": rng.random() < 0.8}
        target["num_global_key_value_heads"] = rng.choice([None, 1, 2])
    if family == "26b-a4b":
        experts = rng.choice([4, 5, 8])
        target |= {
            "enable_moe_block": True,
            "num_experts": experts,
            "top_k_experts": rng.randint(1, experts),
            "moe_intermediate_size": rng.choice([24, 32, 64]),
        }
    shared = ("num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v", "head_dim", "global_head_dim", "rope_parameters")
    drafter = {key: target[key] for key in shared if key in target} | {
        "vocab_size": VOCABULARY,
        "hidden_size": rng.choice([32, 48]),
        "intermediate_size": 64,
        "num_attention_heads": heads,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "sliding_window": target["sliding_window"],
        "max_position_embeddings": target["max_position_embeddings"],
        "tie_word_embeddings": True,
    }
    drafter |= {} if family == "12b" else NO_PER_LAYER
    return RandomPair(
        family=family,
        target=target,
        drafter=drafter,
        ordered=family.startswith("e") and rng.random() < 0.8,
        multimodal=rng.random() < 0.7,
        dtype=rng.choice(["bfloat16", "bfloat16", "float32", "float16"]),
        published=rng.random() < 0.5,
    )


def write_random_pair(
    seed: int,
    folder: Path,
    *,
    both: Mapping[str, Any] | None = None,
    drafter: Mapping[str, Any] | None = None,
    matrices: float = 1.0,
) -> tuple[RandomPair, Path, Path]:
    """Draws a pair and writes it, with these values in both configs, and in the drafter's; returns it with the folders of both.

    `matrices`: how many times as large as usual the weights of all matrices are, the head and its table included.
    """
    import torch

    pair = draw(seed)
    pair = replace(pair, target=pair.target | dict(both or {}), drafter=pair.drafter | dict(both or {}) | dict(drafter or {}))
    backbone = {"backbone": pair.target["hidden_size"], "ordered": pair.ordered}
    for half, text, kind in (("target", pair.target, {"multimodal": pair.multimodal}), ("drafter", pair.drafter, backbone)):
        model = built_model(text, unified=pair.unified, **kind)
        _fill(model, seed, matrices)
        model.to(getattr(torch, pair.dtype)).save_pretrained(folder / half)
        if pair.published:
            publish_config(folder / half, text)
        (folder / half / "generation_config.json").unlink(missing_ok=True)
        write_tokenizer(folder / half)
    return pair, folder / "target", folder / "drafter"


def kept_bundle(seed: int, **request: Any) -> tuple[RandomPair, Path]:
    """Draws a pair; returns it with its bundle's folder, exported once for all tests, read-only, and not compared with transformers."""
    from edge_export.pipeline.export import export_pair
    from edge_export.pipeline.request import ExportRequest

    def make(folder: Path) -> None:
        _, target, drafter = write_random_pair(seed, folder)
        values = {"target": str(target), "drafter": str(drafter), "output": folder / "bundle", "context": 1024, "verify": False}
        export_pair(ExportRequest(**values | request))

    return draw(seed), kept("random", {"seed": seed, **request}, make) / "bundle"


def _fill(model: Any, seed: int, matrices: float) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            tensor.copy_(torch.randperm(tensor.numel(), generator=generator).view(tensor.shape))
        elif tensor.dim() < 2:
            near_one = 1 + 0.1 * torch.randn(tensor.shape, generator=generator)
            signs = torch.where(torch.rand(tensor.shape, generator=generator) < 0.2, -1.0, 1.0)
            # Scores of random queries and keys spread by sqrt(head_dim); attention to one row alone would make chaos of rounding errors.
            sharp = tensor.numel() ** -0.5 if name.endswith("q_norm.weight") else 1.0
            tensor.copy_(near_one * (signs if name.endswith("per_expert_scale") else sharp))
        else:
            scale = 0.5 if "embed_tokens" in name else matrices * tensor.shape[-1] ** -0.5
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
