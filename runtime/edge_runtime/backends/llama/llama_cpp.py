"""Opens a pair of GGUF files in llama.cpp, by their paths alone: for those who have no bundle."""

from __future__ import annotations

from pathlib import Path

from edge_runtime.backends.llama.context import LlamaOptions
from edge_runtime.backends.llama.drafter import LlamaDrafter
from edge_runtime.backends.llama.target import LlamaTarget

__all__ = ["LlamaDrafter", "LlamaOptions", "LlamaTarget", "open_pair"]


def open_pair(target_path: Path, drafter_path: Path | None, options: LlamaOptions) -> tuple[LlamaTarget, LlamaDrafter | None]:
    """Opens the target and, if there is one and `options.draft` is set, its drafter. Closing the target closes both.

    Raises BackendError if a file is missing or does not load, or if the two are no pair; then nothing stays open.
    """
    target = LlamaTarget(target_path, options)
    if drafter_path is None or not options.draft:
        return target, None
    try:
        return target, LlamaDrafter(drafter_path, target, options)
    except BaseException:
        target.close()
        raise
