"""A pair in llama.cpp: the target with its sequences, and the requested drafter or the bundle's default one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from edge_runtime.backends.interface import CPU
from edge_runtime.backends.kernels.packed_cache import PackedCache, PackedSource
from edge_runtime.backends.llama.context import LlamaOptions
from edge_runtime.backends.llama.drafter import LlamaDrafter, LlamaKernelDrafter, kernels_draft
from edge_runtime.backends.llama.target import LlamaTarget
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.calibration.first_use import ThreadCounts
from edge_runtime.drafting.policies import DrafterKind
from edge_runtime.drafting.sources import LookupDrafter
from edge_runtime.errors import BackendError, BundleError
from edge_runtime.interfaces import Drafter, DraftRequest, DraftSampler, Logits, ShouldContinue

ModelDrafter = LlamaDrafter | LlamaKernelDrafter


class SequenceDrafter:
    """A view of a model drafter for one sequence of its target. Implements `interfaces.Drafter`."""

    stepwise = True

    def __init__(self, drafter: ModelDrafter, number: int) -> None:
        self._drafter = drafter
        self._number = number

    def draft(
        self, last: int, draft_length: int, sampler: DraftSampler | None = None, should_continue: ShouldContinue | None = None
    ) -> list[int]:
        """Returns `draft_length` tokens after `last`, or none if the sequence has no hidden row."""
        return self._drafter.draft_all([DraftRequest(self._number, last, draft_length, sampler, should_continue)])[0]

    def close(self) -> None:
        """Does nothing: the target closes the drafter."""


class LlamaSequenceBatch:
    """All sequences of a target, with their drafters. Implements `interfaces.SequenceBatch`."""

    def __init__(self, target: LlamaTarget, drafter: Drafter | None) -> None:
        """`drafter` is a model drafter, which serves all sequences; or a LookupDrafter, then each sequence gets its own; or None."""
        self.targets = tuple(target.shared.sequences)
        self._shared = target.shared
        self._drafter = drafter if isinstance(drafter, ModelDrafter) else None
        self.drafters: tuple[Drafter | None, ...]
        if self._drafter is not None:
            self.drafters = (self._drafter, *(SequenceDrafter(self._drafter, number) for number in range(1, len(self.targets))))
        else:
            self.drafters = tuple(LookupDrafter(sequence) if drafter is not None else None for sequence in self.targets)

    def draft_all(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Drafts for all requests. llama.cpp's own drafter computes a step of all of them in one forward."""
        if self._drafter is not None:
            return self._drafter.draft_all(requests)
        own = [self.drafters[request.sequence] for request in requests]
        return [
            drafter.draft(request.last, request.draft_length) if drafter else [] for drafter, request in zip(own, requests, strict=True)
        ]

    def verify_all(self, batches: Sequence[tuple[int, Sequence[int]]]) -> list[Logits]:
        """Verifies all batches in one forward."""
        return self._shared.verify_all([(self.targets[number], tokens) for number, tokens in batches])

    def set_threads(self, counts: ThreadCounts) -> None:
        """Sets the number of threads of each phase."""
        self._shared.set_threads(counts.prefill, counts.verify)
        if self._drafter is not None:
            self._drafter.set_threads(counts.draft)

    def close(self) -> None:
        self._shared.close()


_HEAD = "drafter_head"


def open_pair(target_path: Path, drafter_path: Path | None, options: LlamaOptions) -> tuple[LlamaTarget, LlamaDrafter | None]:
    """Opens the target and, if `drafter_path` and `options.draft` are set, llama.cpp's own drafter. Closing the target closes both.

    Raises BackendError if a file is missing or does not load, or if the drafter belongs to another target; then nothing stays open.
    """
    target = LlamaTarget(target_path, options)
    if drafter_path is None or not options.draft:
        return target, None
    try:
        return target, LlamaDrafter(drafter_path, target, options)
    except BaseException:
        target.close()
        raise


def open_with_drafter(
    bundle: Bundle, options: LlamaOptions, requested: DrafterKind | None, packed: PackedCache | None = None
) -> tuple[LlamaTarget, Drafter | None, DrafterKind]:
    """Returns the target, its drafter and the drafter's kind. Closing the target closes both. `packed` caches the target's packed weights.

    Raises BundleError if the bundle lacks the requested drafter, BackendError if a file does not load; then nothing stays open.
    """
    path, sha256 = bundle.path("target", "gguf"), bundle.file("target", "gguf").sha256
    with contextlib.nullcontext() if packed is None else packed.loading(PackedSource(path=path, sha256=sha256)):
        target = LlamaTarget(path, options)
    try:
        if requested == "none":
            return target, None, requested
        if requested == "lookup":
            return target, LookupDrafter(target), requested
        return target, *open_model_drafter(bundle, target, options, requested)
    except BaseException:
        target.close()
        raise


def open_model_drafter(
    bundle: Bundle, target: LlamaTarget, options: LlamaOptions, requested: DrafterKind | None
) -> tuple[ModelDrafter, DrafterKind]:
    """Opens a drafter for an opened target and returns it with its kind.

    The kernels' drafter is preferred; where the kernels cannot compute the model, llama.cpp's dense drafter is used. Raises BundleError if
    a split drafter is requested that the bundle lacks, BackendError if one is requested that the kernels cannot compute.
    """
    if requested == "split" and not bundle.has(_HEAD):
        raise BundleError(f"{bundle.folder} has no split drafter: only checkpoints with ordered embeddings give one; choose dense")
    path, target_path = bundle.path("drafter", "gguf"), bundle.path("target", "gguf")
    if options.device != CPU:
        if requested == "split":
            raise BackendError(f"the split drafter reads a KV cache in the processor's memory, not one on {options.device}; choose dense")
        return LlamaDrafter(path, target, options), "dense"
    kind: DrafterKind = requested or ("split" if bundle.has(_HEAD) else "dense")
    try:
        return LlamaKernelDrafter(path, bundle.path(_HEAD) if kind == "split" else None, target, target_path), kind
    except ValueError as error:  # unless split was requested, llama.cpp's drafter is tried; it reports what is wrong with the files
        if requested == "split":
            raise BackendError(
                f"the row kernels do not compute this split drafter ({error}), and llama.cpp has none; choose dense"
            ) from error
    except BackendError:
        if kind == "split":
            raise
    return LlamaDrafter(path, target, options), "dense"


def drafter_opened(bundle: Bundle, requested: DrafterKind | None, device: str = CPU) -> DrafterKind:
    """Returns the requested kind; by default split, if the bundle has it and the row kernels run, which compute it on the CPU only."""
    return requested or ("split" if device == CPU and bundle.has(_HEAD) and kernels_draft() else "dense")
