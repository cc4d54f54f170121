"""The tuning part of an export: trains the drafter, and takes the tuned one if it is better. Imports torch only when it is asked for."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edge_devices.waiting import Progress
from edge_export.checkpoint.sources import ResolvedSource, resolve_pair
from edge_export.errors import ExportError
from edge_export.parity.reference import reference_of, why_no_reference
from edge_export.pipeline.request import ExportRequest
from edge_runtime.bundle.manifest import DrafterTuning


@dataclass(frozen=True, kw_only=True)
class TunedDrafter:
    """The drafter to export, and how it came about."""

    drafter: ResolvedSource
    record: DrafterTuning


def tuned_drafter(
    request: ExportRequest, pair: tuple[ResolvedSource, ResolvedSource], banned: Sequence[int], progress: Progress
) -> TunedDrafter | None:
    """Returns the tuned drafter; None if no tuning is asked for, or if the original is as good. Raises ExportError.

    The state is in a folder beside the output, so that a stopped call goes on where it was.
    """
    if request.tune_drafter is None:
        return None
    target, drafter = pair
    if target.gguf is not None or drafter.gguf is not None or target.tokenizer_folder is None:
        named = target if target.gguf is not None else drafter
        raise ExportError(f"tuning trains the drafter in transformers, and {named.origin} is a GGUF; give its checkpoint")
    parameters = target.checkpoint.parameters + 4 * drafter.checkpoint.parameters  # gradients and the optimizer's two sums
    if (reason := why_no_reference(parameters)) is not None:
        raise ExportError(f"tuning trains the drafter in transformers, but {reason}")
    # Imported here, as only a tuning needs torch.
    from edge_export.tuning.tune import TuningRequest, tune

    progress.step(f"Tune the drafter on {request.tune_drafter.name}", None)
    tuning = TuningRequest(
        **vars(reference_of(target, drafter, request.thread_count)),
        text=request.tune_drafter,
        folder=tuning_folder(request),
        minutes=request.tune_minutes,
        banned=tuple(banned),
    )
    try:
        record = tune(tuning, progress.note)
    except KeyboardInterrupt:
        progress.note(f"Tuning stopped; its state is in {tuning.folder}, and the same command goes on from there.")
        raise
    if record is None:
        return None
    tuned = resolve_pair(str(target.path), str(tuning.result))[1]
    return TunedDrafter(drafter=replace(tuned, origin=drafter.origin), record=record)


def tuning_folder(request: ExportRequest) -> Path:
    """The folder of the state."""
    return request.output.absolute().with_name(f"{request.output.name}.tuning")


def clear_tuning(request: ExportRequest) -> None:
    """Removes the state once the bundle is complete."""
    if request.tune_drafter is not None:
        shutil.rmtree(tuning_folder(request), ignore_errors=True)
