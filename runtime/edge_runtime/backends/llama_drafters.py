"""Opens a bundle's target in llama.cpp with the drafter that is asked for, or with the faster of those the bundle has."""

from __future__ import annotations

from edge_runtime.backends.base import Drafter
from edge_runtime.backends.llama_context import LlamaOptions
from edge_runtime.backends.llama_cpp import LlamaDrafter, LlamaTarget
from edge_runtime.backends.llama_split import LlamaSplitDrafter
from edge_runtime.bundle import Bundle
from edge_runtime.drafters import DrafterKind, draft_step_seconds
from edge_runtime.errors import BundleError
from edge_runtime.lookup import LookupDrafter

_BODY, _HEAD = "drafter_body", "drafter_head"


def open_with_drafter(
    bundle: Bundle, options: LlamaOptions, wanted: DrafterKind | None
) -> tuple[LlamaTarget, Drafter | None, DrafterKind]:  # fmt: skip
    """Returns the target, its drafter and which kind it is. Closing the target closes both. `wanted` None measures where there is a choice.

    Raises BundleError if the bundle has no such drafter, BackendError if a file does not load; then nothing stays open.
    """
    target = LlamaTarget(bundle.path("target", "gguf"), options)
    try:
        if wanted == "none":
            return target, None, "none"
        if wanted == "lookup":
            return target, LookupDrafter(target), "lookup"
        if wanted == "split" or wanted == "dense":
            return target, open_model_drafter(bundle, target, options, wanted), wanted
        return target, *_faster(bundle, target, options)
    except BaseException:
        target.close()
        raise


def open_model_drafter(bundle: Bundle, target: LlamaTarget, options: LlamaOptions, kind: DrafterKind) -> LlamaDrafter:
    """Opens the dense or the split drafter on an opened target."""
    if kind == "dense":
        return LlamaDrafter(bundle.path("drafter", "gguf"), target, options)
    if not has_split(bundle):
        raise BundleError(f"{bundle.folder} has no split drafter: only checkpoints with ordered embeddings give one; choose dense")
    return LlamaSplitDrafter(bundle.path(_BODY, "gguf"), bundle.path(_HEAD), target, bundle.path("target", "gguf"), options)


def has_split(bundle: Bundle) -> bool:
    """Whether the bundle holds both files of the split drafter."""
    return bundle.has(_BODY, "gguf") and bundle.has(_HEAD)


def _faster(bundle: Bundle, target: LlamaTarget, options: LlamaOptions) -> tuple[LlamaDrafter, DrafterKind]:
    dense = open_model_drafter(bundle, target, options, "dense")
    if not has_split(bundle):
        return dense, "dense"
    split = open_model_drafter(bundle, target, options, "split")
    seconds = draft_step_seconds(target, {"dense": dense, "split": split}, max(target.vocabulary.bos, 0))
    if seconds["split"] < seconds["dense"]:
        dense.close()
        return split, "split"
    split.close()
    return dense, "dense"
