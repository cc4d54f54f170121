"""Prefixes of tensor names in published checkpoints and in those that tools saved -> the names of a text-only checkpoint."""

from __future__ import annotations

# In this order: longer ones first. Old spellings of transformers, Unsloth and MLX; the last one is Google's.
_PREFIXES = {
    "model.language_model.model.": "model.",
    "model.language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",
    "model.language_model.": "model.",
}
# The text model's own tensors; other tensors of a multimodal checkpoint belong to its towers.
_TEXT = ("model.layers.", "model.embed_tokens", "model.norm.", "model.per_layer_", "lm_head.")
# As transformers saves them, with and without towers.
CURRENT = ("model.language_model.", "model.layers.", "model.embed_tokens", "model.norm.", "model.per_layer_", "lm_head.")


def text_name(name: str, *, multimodal: bool) -> str | None:
    """Returns a tensor's name in a text-only checkpoint; None if it belongs to another part of a multimodal one."""
    for prefix, short in _PREFIXES.items():
        if name.startswith(prefix):
            return short + name[len(prefix) :]
    return name if not multimodal or name.startswith(_TEXT) else None
