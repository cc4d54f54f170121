"""The sources of an export's importance: imatrix files of llama.cpp, or a calibration text on which the pair is run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from edge_devices.option_fields import option
from edge_export.checkpoint.sources import ResolvedSource
from edge_export.errors import ExportError
from edge_export.parity.reference import reference_of
from edge_export.quantization.imatrix_file import read_imatrix, write_imatrix
from edge_export.quantization.importance import Importance, fitted
from edge_export.quantization.moments import SecondMoments

SAVED = {"target": "target.imatrix.gguf", "drafter": "drafter.imatrix.gguf"}


@dataclass(frozen=True, kw_only=True)
class ImportanceSources:
    """Where importance comes from: imatrix files of the two models, or a text to calibrate on.

    `save` is a folder that gets the matrices computed from the text.
    """

    calibrate: Path | None = option(
        metavar="TEXT",
        help="Weigh and compensate the errors of quantization by running the pair in transformers on this text file:"
        " a few hundred kB of the kind of text that the model will read.",
    )
    save: Path | None = option("--save-imatrix", metavar="FOLDER", help="Save the matrices of --calibrate here, in llama.cpp's format.")
    imatrix: Path | None = option(metavar="FILE", help="The target's importance matrix, as written by llama-imatrix.")
    drafter_imatrix: Path | None = option(metavar="FILE", help="The drafter's importance matrix.")

    @property
    def are_given(self) -> bool:
        """Whether there is any source."""
        return bool(self.imatrix or self.drafter_imatrix or self.calibrate)


def importance_of_pair(
    sources: ImportanceSources,
    models: Mapping[str, ResolvedSource],
    roles: Mapping[str, bool],
    *,
    scratch: Path,
    threads: int,
    progress: Callable[[int], None],
) -> dict[str, Importance]:
    """Returns the importance by role, of the roles in `roles` only: those whose quantization uses it, and whether it uses moments too.

    `models` are target and drafter; `scratch` is a folder for the second moments that a calibration computes, and has to stay as long
    as the importance is used; `progress` gets the bytes of calibration text done. Raises ExportError if no quantization uses it, or if
    it does not fit the model.
    """
    files = {"target": sources.imatrix, "drafter": sources.drafter_imatrix}
    for role in [role for role, path in files.items() if path is not None and role not in roles]:
        raise ExportError(
            f"the {role} is not quantized here in a way that importance changes; leave {files[role]} out, or choose e.g. q4_0"
        )
    if sources.calibrate is not None and not roles:
        raise ExportError("neither model is quantized here in a way that importance changes; leave --calibrate out, or choose e.g. q4_0")
    importance = {}
    for role, path in files.items():
        if path is not None:
            entries, source = read_imatrix(path)
            importance[role] = fitted(entries, models[role].checkpoint, source)
    if sources.calibrate is not None:
        moments = {role: SecondMoments(scratch / role) for role, used in roles.items() if used}
        made = _calibrated(sources, sources.calibrate, models, roles, moments, threads=threads, progress=progress)
        importance |= {role: replace(made[role], moments=moments.get(role)) for role in roles}
    return importance


def _calibrated(
    sources: ImportanceSources,
    text: Path,
    models: Mapping[str, ResolvedSource],
    roles: Collection[str],
    moments: Mapping[str, SecondMoments],
    *,
    threads: int,
    progress: Callable[[int], None],
) -> dict[str, Importance]:
    # Imported here, as only a calibration needs torch.
    from edge_export.quantization.calibration import CalibrationRequest, calibrate

    target, drafter = models["target"], models["drafter"]
    if target.gguf is not None or target.tokenizer_folder is None:
        raise ExportError(f"calibration runs the target in transformers, and {target.origin} is a GGUF; give its checkpoint")
    with_drafter = drafter.gguf is None and ("drafter" in roles or sources.save is not None)
    model, reference = target.checkpoint, reference_of(target, drafter, threads)
    made = calibrate(
        CalibrationRequest(
            **vars(reference) | {"parameters": model.parameters + (drafter.checkpoint.parameters if with_drafter else 0)},
            text=text,
            with_drafter=with_drafter,
            moments=moments,
        ),
        progress,
    )
    importance = {"target": fitted(made.target, model, made.source)}
    if with_drafter:
        importance["drafter"] = fitted(made.drafter, drafter.checkpoint, made.source)
    if sources.save is not None:
        for role, entries in (("target", made.target), ("drafter", made.drafter)):
            if entries:
                write_imatrix(sources.save / SAVED[role], entries, text.name, made.source.tokens or 0, made.chunk)
    return importance
