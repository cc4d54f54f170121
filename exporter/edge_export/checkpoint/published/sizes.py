"""The sizes of Gemma 4: (layers, hidden size) and the name that their repositories have."""

from __future__ import annotations

from typing import Any

SIZES = {(35, 1536): "E2B", (42, 2560): "E4B", (48, 3840): "12B", (30, 2816): "26B-A4B", (60, 5376): "31B"}


def size_of(config: dict[str, Any]) -> str | None:
    """Returns the size that a target's config.json belongs to; None for others and for assistants."""
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    layers, hidden = inner.get("num_hidden_layers"), inner.get("hidden_size")
    return SIZES.get((layers, hidden)) if type(layers) is int and type(hidden) is int else None
