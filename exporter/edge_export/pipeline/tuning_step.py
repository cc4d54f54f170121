"""The tuning step of an export: trains the drafter, and takes the tuned one if it is better. Imports torch only on request."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from edge_export.checkpoint.sources import resolve_pair
from edge_export.errors import ExportError
from edge_export.parity.reference import why_no_reference
from edge_export.pipeline.request import ExportJob, ExportRequest


def with_tuned_drafter(job: ExportJob) -> ExportJob:
    """Returns the job with the tuned drafter; as it is if no tuning is asked for, or if the original is as good. Raises ExportError.

    The state is in a folder beside the output, so that a stopped call goes on where it was.
    """
    request, progress, (target, drafter) = job.request, job.progress, job.pair
    if request.tune_drafter is None:
        return job
    if target.gguf is not None or drafter.gguf is not None:
        named = target if target.gguf is not None else drafter
        raise ExportError(f"tuning trains the drafter in transformers, and {named.origin} is a GGUF; give its checkpoint")
    parameters = target.checkpoint.parameters + 4 * drafter.checkpoint.parameters  # gradients and the optimizer's two sums
    if (reason := why_no_reference(parameters)) is not None:
        raise ExportError(f"tuning trains the drafter in transformers, but {reason}")
    # Imported here, as only a tuning needs torch.
    from edge_export.tuning.tune import TuningRequest, tune

    progress.step(f"Tune the drafter on {request.tune_drafter.name}", None)
    tuning = TuningRequest(
        reference=job.reference,
        text=request.tune_drafter,
        folder=tuning_folder(request),
        minutes=request.tune_minutes,
        banned=() if job.generation is None else job.generation.end_tokens,
    )
    try:
        record = tune(tuning, progress.note)
    except KeyboardInterrupt:
        progress.note(f"Tuning stopped; its state is in {tuning.folder}. Run the same command again to continue.")
        raise
    if record is None:
        return job
    tuned = replace(resolve_pair(str(target.path), str(tuning.result))[1], origin=drafter.origin)
    return replace(job, reference=replace(job.reference, drafter=tuned), tuning=record)


def tuning_folder(request: ExportRequest) -> Path:
    """The folder of the state."""
    return request.output.absolute().with_name(f"{request.output.name}.tuning")


def clear_tuning(request: ExportRequest) -> None:
    """Removes the state once the bundle is complete."""
    if request.tune_drafter is not None:
        shutil.rmtree(tuning_folder(request), ignore_errors=True)
