"""The sizes of Gemma 4: (layers, hidden size), the name that their repositories have, and their published configs.

Sources: config.json of google/gemma-4-SIZE-it and of its -assistant.
"""

from __future__ import annotations

from typing import Any

SIZES = {(35, 1536): "E2B", (42, 2560): "E4B", (48, 3840): "12B", (30, 2816): "26B-A4B", (60, 5376): "31B"}
_VOCABULARY = 262_144
_SMALL = {"sliding_window": 512, "max_position_embeddings": 131_072}
_LARGE = {"sliding_window": 1024, "max_position_embeddings": 262_144, "attention_k_eq_v": True}
# Feed-forward width, heads, K/V heads, K/V heads of full layers, K/V-shared layers, every how many layers a full one.
_NUMBERS = {
    "E2B": (6144, 8, 1, None, 20, 5),
    "E4B": (10_240, 8, 2, None, 18, 6),
    "12B": (15_360, 16, 8, 1, 0, 6),
    "26B-A4B": (2112, 16, 8, 2, 0, 6),
    "31B": (21_504, 32, 16, 4, 0, 6),
}
_EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}


def size_of(config: dict[str, Any]) -> str | None:
    """Returns the size that a target's config.json belongs to; None for others and for assistants."""
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    layers, hidden = inner.get("num_hidden_layers"), inner.get("hidden_size")
    return SIZES.get((layers, hidden)) if type(layers) is int and type(hidden) is int else None


def published_config(size: str, *, assistant: bool) -> dict[str, Any] | None:
    """Returns what matters here of the config.json of this size's target or assistant; None for an unknown size."""
    shape = next((key for key, name in SIZES.items() if name.lower() == size.lower()), None)
    if shape is None:
        return None
    (layers, hidden), name = shape, SIZES[shape]
    feed_forward, heads, kv_heads, full_kv_heads, shared, step = _NUMBERS[name]
    small = name.startswith("E")
    common: dict[str, Any] = (_SMALL if small else _LARGE) | {
        "vocab_size": _VOCABULARY,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_key_value_heads": kv_heads,
        "num_global_key_value_heads": full_kv_heads,
    }
    if assistant:
        text = common | {
            "hidden_size": 256 if small else 1024,
            "intermediate_size": 2048 if small else 8192,
            "num_attention_heads": 4 if small else heads,
            "num_hidden_layers": 4,
            "layer_types": _layer_types(4, 4),
            "num_kv_shared_layers": 4,
            "hidden_size_per_layer_input": 0,
        }
        outer = {"model_type": "gemma4_assistant", "backbone_hidden_size": hidden, "use_ordered_embeddings": small}
        return outer | {"text_config": text}
    text = common | {
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "layer_types": _layer_types(layers, step),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": name == "E2B",
        "hidden_size_per_layer_input": 256 if small else 0,
        "final_logit_softcapping": 30.0,
    }
    return {"model_type": "gemma4", "text_config": text | (_EXPERTS if name == "26B-A4B" else {})}


def _layer_types(layers: int, step: int) -> list[str]:
    return ["sliding_attention" if (layer + 1) % step else "full_attention" for layer in range(layers)]
