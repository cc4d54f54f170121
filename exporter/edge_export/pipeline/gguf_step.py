"""The GGUF part of an export: converts, quantizes, writes the drafter's sparse head, and compares with the reference."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from edge_devices.waiting import Progress
from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.sources import ResolvedSource
from edge_export.errors import ExportError
from edge_export.gguf.keys import architecture_name
from edge_export.gguf.media_encoder import ENCODER_LIMITS, plan_encoder
from edge_export.gguf.writer import ExactReport, GgufPlan, head_bytes, output_rows, plan_exact, plan_gguf, trained_for_q4, write_head
from edge_export.output import BundlePart
from edge_export.parity.gguf import ComparedModel, encoder_parity, measure_parity
from edge_export.pipeline.bundle_files import copy_file
from edge_export.pipeline.request import DRAFTER_QUANTIZATION, SWITCHED_OFF, TARGET_QUANTIZATION, TRAINED_QUANTIZATION, ExportJob
from edge_export.quantization.gguf_quantization import DIRECT, compensate_gguf, library_version, quantize_gguf
from edge_export.quantization.importance import Importance, matrix_kind
from edge_runtime.bundle.gguf_gemma4 import check_header
from edge_runtime.bundle.gguf_header import QUANTIZATIONS, GgufError, parse_gguf_header
from edge_runtime.bundle.manifest import MEDIA_ENCODER
from edge_runtime.errors import BackendError

# By these words in a file's name, llama.cpp recognizes drafters, encoders and parts of a split file (common/download.cpp,
# common/preset.cpp).
_DRAFTER_PREFIX, _ENCODER_PREFIX = "mtp-", "mmproj-"
_WORDS_OF_OTHERS = re.compile(r"(mtp|dspark|dflash|eagle3)-|mmproj|imatrix|-\d{5}-of-\d{5}", re.IGNORECASE)
_QUANTIZATION_SUFFIX = re.compile(r"[-._](i?q\d\w*|bf16|f16|f32|mxfp4)$", re.IGNORECASE)
_LONGEST_NAME = 80


def model_name(target: ResolvedSource) -> str:
    """Returns the first part of the GGUF files' names.

    It is gemma-4-E2B-it for google/gemma-4-E2B-it, for gemma-4-E2B-it-Q4_0.gguf, and for a folder of either name. Words by which llama.cpp
    would take the target for something else are removed.
    """
    name = re.sub(r"@[^:]*", "", target.public_name).rpartition("/")[2].rpartition(":")[2].removesuffix(".gguf")
    name = _WORDS_OF_OTHERS.sub("", _QUANTIZATION_SUFFIX.sub("", re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)))
    return name[:_LONGEST_NAME].strip("-.") or "target"


@dataclass(frozen=True, kw_only=True)
class GgufModel(ComparedModel):
    """How one half gets into the bundle. `plan` writes the file `unquantized`; `exported` is the file in the bundle.

    They are the same file for a weight type that our converter writes itself. `plan` is None for an existing GGUF, which is copied. `exact`
    writes the quantized file without llama.cpp, from weights that were trained for that quantization.
    """

    source: ResolvedSource
    plan: GgufPlan | None
    exact: GgufPlan | None = None
    report: ExactReport | None = None

    @property
    def direct(self) -> bool:
        return self.unquantized == self.exported

    @property
    def needed_bytes(self) -> int:
        """The approximate disk space that is needed while it is made, in bytes."""
        if self.plan is None:
            return self.source.path.stat().st_size
        return self.plan.bytes + (0 if self.direct else self.exported_bytes)

    @property
    def exported_bytes(self) -> int:
        """The approximate size of the bundle's file, in bytes."""
        checkpoint = self.source.checkpoint
        weights = QUANTIZATIONS[self.quantization].file_bytes(checkpoint.parameters, checkpoint.architecture.table_weights)
        return weights + (0 if self.plan is None else len(self.plan.header))

    def part(self, role: str, path: Path) -> BundlePart:
        """Returns the bundle's entry for a file with these weights."""
        return BundlePart(role=role, path=path, format="gguf", quantization=self.quantization)


@dataclass(frozen=True, kw_only=True)
class GgufFiles:
    """The GGUF files of a bundle: target, drafter, and if there are any, the drafter's sparse head and the encoder of images and sound."""

    models: tuple[GgufModel, GgufModel]
    encoder: GgufPlan | None = None
    head_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        """The approximate disk space that is needed while they are made, in bytes, with unquantized files."""
        return sum(model.needed_bytes for model in self.models) + self.head_bytes + (self.encoder.bytes if self.encoder is not None else 0)

    @property
    def importance_roles(self) -> dict[str, frozenset[str]]:
        """The roles whose quantization uses importance, each with the kinds of matrices whose errors are not compensated."""
        quantized = [model for model in self.models if model.plan is not None and model.exact is None]
        kinds = {model.source.role: QUANTIZATIONS[model.quantization] for model in quantized}
        return {role: frozenset(matrix_kind(part) for part, _ in kind.raised) for role, kind in kinds.items() if kind.weighed}


def plan_pair(job: ExportJob, folder: Path) -> GgufFiles:
    """Plans the GGUF files. Raises ExportError if a requested quantization is not possible."""
    request, (target, drafter) = job.request, job.pair
    name = model_name(target)
    models = (
        _plan(target, request.target_quantization, TARGET_QUANTIZATION, folder, name),
        _plan(drafter, request.drafter_quantization, DRAFTER_QUANTIZATION, folder, _DRAFTER_PREFIX + name),
    )
    return GgufFiles(
        models=models,
        encoder=None if request.media is None else plan_encoder(target.checkpoint, request.media),
        head_bytes=planned_head_bytes(drafter.checkpoint, models[1].quantization) if job.sparse_head else 0,
    )


def planned_head_bytes(drafter: Checkpoint, quantization: str) -> int:
    """Returns the approximate size of the sparse head's file for a drafter in this quantization."""
    hidden = drafter.assistant.hidden_size
    return head_bytes(drafter, QUANTIZATIONS[quantization].file_bytes(hidden, hidden))


def _check_runs(source: ResolvedSource, plan: GgufPlan | None) -> None:
    """Raises ExportError if the runtime would refuse this model's file, planned or existing."""
    try:
        header = source.gguf if plan is None else parse_gguf_header(source.path, plan.header, plan.bytes)
        assert header is not None  # only an existing GGUF has no plan
        check_header(header, architecture_name(source.checkpoint.architecture))
    except (GgufError, BackendError) as error:
        instead = "give its checkpoint" if plan is None else "export it with --format onnx, or give an unmodified checkpoint"
        raise ExportError(f"{str(error).split(';', maxsplit=1)[0]}, so the runtime would refuse its GGUF; {instead}") from error


def _plan(source: ResolvedSource, requested: str | None, default: str, folder: Path, name: str) -> GgufModel:
    def named(quantization: str) -> Path:
        return folder / f"{name}-{quantization.upper()}.gguf"

    if source.quantization is not None:
        if requested not in (None, source.quantization):
            raise ExportError(
                f"{source.origin} is a GGUF and taken as it is ({source.quantization});"
                f" leave --{source.role}-quant out, or give the checkpoint"
            )
        _check_runs(source, None)
        path = named(source.quantization)
        return GgufModel(source=source, quantization=source.quantization, weight_type="f32", plan=None, unquantized=path, exported=path)
    trained = requested in (None, TRAINED_QUANTIZATION) and trained_for_q4(source.checkpoint)
    quantization = requested or (TRAINED_QUANTIZATION if trained and source.role == "target" else default)
    exported = named(quantization)
    report = ExactReport() if quantization == TRAINED_QUANTIZATION and trained else None
    weight_type, unquantized = DIRECT.get(quantization), exported
    if weight_type is None:
        if report is None:
            library_version()
        weight_type = source.stored_type
        unquantized = folder / f"{source.role}-unquantized-{weight_type}.gguf"
    assert source.tokenizer is not None  # only a GGUF source has no tokenizer here
    plan = plan_gguf(source.checkpoint, weight_type, source.tokenizer)
    _check_runs(source, plan)
    return GgufModel(
        source=source,
        quantization=quantization,
        weight_type=weight_type,
        plan=plan,
        unquantized=unquantized,
        exported=exported,
        exact=None if report is None else plan_exact(source.checkpoint, source.tokenizer, report),
        report=report,
    )


def make_gguf(files: GgufFiles, job: ExportJob, importance: Mapping[str, Importance]) -> tuple[list[BundlePart], dict[str, Any]]:
    """Writes the GGUF files. Returns them and the manifest's `parity`. Raises ExportError."""
    request, progress, (target, drafter) = job.request, job.progress, files.models
    for model in files.models:
        _make_model(model, request.thread_count, importance.get(model.source.role), progress)
    parts = [model.part(model.source.role, model.exported) for model in files.models]
    if job.sparse_head:
        parts.append(_make_head(drafter, progress))
    encoder = None
    if files.encoder is not None and request.media is not None:
        path = target.exported.with_name(f"{_ENCODER_PREFIX}{model_name(target.source)}-{request.media.upper()}.gguf")
        progress.step(f"Convert the media encoder to {request.media}", files.encoder.bytes)
        files.encoder.write(path, progress.advance)
        encoder = BundlePart(role=MEDIA_ENCODER, path=path, format="gguf", quantization=request.media)
        parts.append(encoder)
    parity = _parity(files, encoder, job, importance)
    for model in files.models:
        if not model.direct:
            model.unquantized.unlink(missing_ok=True)
    grid = {model.source.role: model.report.counts() for model in files.models if model.report is not None}
    return parts, parity | ({"grid": grid} if grid else {})


def _make_model(model: GgufModel, threads: int, importance: Importance | None, progress: Progress) -> None:
    source = model.source
    if model.plan is None:
        progress.step(f"Copy the {source.role}", source.path.stat().st_size)
        copy_file(source.path, model.exported, progress.advance)
        return
    progress.step(f"Convert the {source.role} to {model.weight_type}", model.plan.bytes)
    model.plan.write(model.unquantized, progress.advance)
    if model.exact is not None and model.report is not None:
        progress.step(f"Write the {source.role} to {model.quantization}, on its own grid", model.exact.bytes)
        model.exact.write(model.exported, progress.advance)
        progress.note(f"{source.role.capitalize()}: {model.report.sentence()}")
    elif not model.direct:
        progress.step(f"Quantize the {source.role} to {model.quantization}", model.exported_bytes)
        quantize_gguf(model.unquantized, model.exported, model.quantization, threads, progress.advance, importance)
        if importance is not None and importance.moments is not None:
            progress.step(f"Compensate the {source.role}'s rounding errors", model.exported.stat().st_size)
            compensate_gguf(model.exported, source.checkpoint, importance, progress.advance)


def _make_head(drafter: GgufModel, progress: Progress) -> BundlePart:
    """Writes the drafter's sparse head, with the output rows of the exported drafter. llama.cpp's drafter files do not contain it."""
    checkpoint = drafter.source.checkpoint
    # It does not end in .gguf, because other programs would take it for a model.
    head = drafter.exported.with_suffix(".gguf_head")
    rows = output_rows(drafter.exported)
    progress.step("Write the drafter's sparse head", head_bytes(checkpoint, rows.bytes // rows.shape[1]))
    write_head(checkpoint, drafter.exported, head, progress.advance)
    return drafter.part("drafter_head", head)


def _parity(files: GgufFiles, encoder: BundlePart | None, job: ExportJob, importance: Mapping[str, Importance]) -> dict[str, Any]:
    if not job.request.verify:
        return dict(SWITCHED_OFF)
    if existing := [model.source.role for model in files.models if model.plan is None]:
        return {"skipped": f"the {' and '.join(existing)} came as GGUF, without a checkpoint to compare with"}
    job.progress.step("Compare with the reference", None)
    target = files.models[0]
    with tempfile.TemporaryDirectory(dir=target.exported.parent) as scratch:
        uncalibrated = None
        if "target" in importance and importance["target"].source.kind == "calibration":
            uncalibrated = partial(_quantized, target, Path(scratch) / target.exported.name, job.request.thread_count)
        figures = measure_parity(job.reference, files.models, job.progress.note, uncalibrated)
    kind = job.request.media
    if kind is None or encoder is None or job.media is None or "skipped" in figures:
        return figures
    limit = ENCODER_LIMITS[kind]
    return figures | {"media": encoder_parity(job.reference, target.exported, encoder.path, job.media, quantization=kind, limit=limit)}


def _quantized(target: GgufModel, path: Path, threads: int) -> Path:
    """Writes the target as it would be without calibration."""
    quantize_gguf(target.unquantized, path, target.quantization, threads)
    return path
