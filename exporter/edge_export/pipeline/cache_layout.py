"""From a checked pair to the bundle's cache layout and architecture facts."""

from __future__ import annotations

from edge_export.checkpoint.architecture import FULL, SLIDING, TextArchitecture
from edge_export.checkpoint.checkpoint import Checkpoint, check_pair
from edge_export.checkpoint.published.sizes import SIZES
from edge_export.errors import CheckpointError
from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH, Architecture, CacheLayout, LayerCache

CACHE_DTYPE = "f16"
# llama.cpp rounds its caches up to this many rows (src/llama-kv-cache-iswa.cpp).
ROW_STEP = 256


def cache_layout(target: Checkpoint, drafter: Checkpoint, context: int) -> CacheLayout:
    """The K/V rows a loop over `context` tokens keeps: who owns them, who reads them, how many there are.

    Raises CheckpointError if the two are no pair or `context` is not in 1..max_position_embeddings.
    """
    check_pair(target, drafter)
    model = target.architecture
    if not 1 <= context <= model.context:
        raise CheckpointError(f"context {context} is not in 1..{model.context}, what {target.folder} was made for; choose another")
    owners = tuple(layer if layer < model.owning_layers else model.last_owner(kind) for layer, kind in enumerate(model.layer_types))
    sliding = None
    if SLIDING in model.layer_types:
        rows = -(-(model.window + MAX_DRAFT_LENGTH) // ROW_STEP) * ROW_STEP
        sliding = _layer_cache(model, SLIDING, min(rows, context), model.window)
    return CacheLayout(
        sliding=sliding,
        full=_layer_cache(model, FULL, context, None),
        layer_owners=owners,
        drafter_sources=tuple(model.last_owner(kind) for kind in drafter.architecture.layer_types),
        rewind_slack=MAX_DRAFT_LENGTH,
    )


def _layer_cache(model: TextArchitecture, kind: str, capacity: int, window: int | None) -> LayerCache:
    owners = tuple(layer for layer in range(model.owning_layers) if model.layer_types[layer] == kind)
    return LayerCache(
        kv_heads=model.kv_heads_of(owners[0]),
        head_dim=model.head_dim_of(owners[0]),
        dtype=CACHE_DTYPE,
        capacity=capacity,
        window=window,
        owner_layers=owners,
    )


def architecture(target: Checkpoint, drafter: Checkpoint, context: int) -> Architecture:
    """Facts of the pair for the manifest; `context` is the context length the bundle is made for."""
    model, assistant = target.architecture, drafter.assistant
    return Architecture(
        family=SIZES.get((model.layers, model.hidden_size), "custom"),
        hidden_size=model.hidden_size,
        layers=model.layers,
        vocab_size=model.vocab_size,
        context_length=context,
        parameters=target.parameters,
        drafter_hidden_size=assistant.hidden_size,
        drafter_layers=assistant.layers,
        drafter_parameters=drafter.parameters,
        ordered_embeddings=assistant.ordered_embeddings,
        feed_forward_size=_widest_feed_forward(model),
        per_layer_size=model.per_layer_size,
        drafter_feed_forward_size=_widest_feed_forward(assistant),
    )


def _widest_feed_forward(model: TextArchitecture) -> int:
    """The most values per token that a feed-forward block computes at once: the dense width and that of the experts in use."""
    return max(model.feed_forward_of(layer) for layer in range(model.layers)) + model.experts_used * model.expert_size
