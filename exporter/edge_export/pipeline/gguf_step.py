"""The GGUF part of an export: convert, quantize, split the drafter, compare with the reference."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_devices.waiting import Progress
from edge_export.checkpoint.safetensors import FloatType
from edge_export.checkpoint.sources import ResolvedSource
from edge_export.errors import ExportError
from edge_export.gguf.keys import architecture_name
from edge_export.gguf.media_encoder import EncoderType, media_architecture, media_inputs, plan_encoder
from edge_export.gguf.split_drafter import head_bytes, output_rows, write_body, write_head
from edge_export.gguf.writer import ExactReport, GgufPlan, plan_exact, plan_gguf, trained_for_q4
from edge_export.output.atomic_folder import BundlePart
from edge_export.parity.gguf import ParityRequest, encoder_parity, measure_parity
from edge_export.parity.reference import reference_of
from edge_export.pipeline.bundle_files import copy_file
from edge_export.pipeline.request import DRAFTER_QUANTIZATION, TARGET_QUANTIZATION, ExportRequest
from edge_export.quantization.compensated_gguf import compensate_gguf
from edge_export.quantization.importance import Importance
from edge_export.quantization.llama_quantize import DIRECT, library_version, quantize_gguf
from edge_runtime.bundle.gguf_gemma4 import check_header
from edge_runtime.bundle.gguf_header import GgufError, parse_gguf_header
from edge_runtime.bundle.gguf_types import QUANTIZATIONS
from edge_runtime.bundle.manifest import MEDIA_ENCODER
from edge_runtime.errors import BackendError

# Tokenizer, template and manifest.
_SMALL_FILES_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class GgufModel:
    """One half on its way into the bundle. `unquantized` is written first, by `plan`; `exported` is the bundle's file.

    Both are the same file for a weight type that our converter writes itself. `plan` is None for an existing GGUF, which is copied.
    `exact` writes the quantized file without llama.cpp, from weights that were trained for it.
    """

    source: ResolvedSource
    quantization: str
    weight_type: FloatType
    plan: GgufPlan | None
    unquantized: Path
    exported: Path
    exact: GgufPlan | None = None
    report: ExactReport | None = None

    @property
    def role(self) -> str:
        """Its role in the bundle."""
        return self.source.role

    @property
    def direct(self) -> bool:
        """Whether no quantization follows."""
        return self.unquantized == self.exported

    @property
    def needed_bytes(self) -> int:
        """About how much disk it takes while it is made."""
        if self.plan is None:
            return self.source.path.stat().st_size
        return self.plan.bytes + (0 if self.direct else self.exported_bytes)

    @property
    def exported_bytes(self) -> int:
        """About how many bytes the bundle's file will have."""
        checkpoint = self.source.checkpoint
        return QUANTIZATIONS[self.quantization].file_bytes(checkpoint.parameters, checkpoint.architecture.table_weights)


@dataclass(frozen=True, kw_only=True)
class GgufPair:
    """The two GGUF files of a bundle; `split` adds a split drafter, `encoder` that of images and sound."""

    target: GgufModel
    drafter: GgufModel
    split: bool
    encoder: GgufPlan | None = None

    @property
    def models(self) -> tuple[GgufModel, GgufModel]:
        """Target and drafter."""
        return self.target, self.drafter

    @property
    def importance_roles(self) -> set[str]:
        """The roles whose quantization takes account of importance."""
        return {
            model.role
            for model in self.models
            if model.plan is not None and model.exact is None and QUANTIZATIONS[model.quantization].weighed
        }


def plan_pair(request: ExportRequest, pair: tuple[ResolvedSource, ResolvedSource], *, split: bool, folder: Path) -> GgufPair:
    """Plans the GGUF files. Raises ExportError if a quantization cannot be had, or if the disk has no room."""
    planned = GgufPair(
        target=_plan(pair[0], request.target_quantization, TARGET_QUANTIZATION, folder),
        drafter=_plan(pair[1], request.drafter_quantization, DRAFTER_QUANTIZATION, folder),
        split=split,
        encoder=None if request.media is None else plan_encoder(pair[0].checkpoint, request.media),
    )
    check_space(planned, folder)
    return planned


def _check_runs(source: ResolvedSource, plan: GgufPlan | None) -> None:
    """Raises ExportError if the runtime would refuse this half's file, planned or existing."""
    try:
        header = source.gguf if plan is None else parse_gguf_header(source.path, plan.header, plan.bytes)
        assert header is not None  # only an existing GGUF has no plan
        check_header(header, architecture_name(source.checkpoint.architecture))
    except (GgufError, BackendError) as error:
        instead = "give its checkpoint" if plan is None else "export it with --format onnx, or give an unmodified checkpoint"
        raise ExportError(f"{str(error).split(';', maxsplit=1)[0]}, so the runtime would refuse its GGUF; {instead}") from error


def _plan(source: ResolvedSource, requested: str | None, default: str, folder: Path) -> GgufModel:
    if source.quantization is not None:
        if requested not in (None, source.quantization):
            raise ExportError(
                f"{source.origin} is a GGUF and taken as it is ({source.quantization});"
                f" leave --{source.role}-quant out, or give the checkpoint"
            )
        _check_runs(source, None)
        path = folder / f"{source.role}-{source.quantization}.gguf"
        return GgufModel(source=source, quantization=source.quantization, weight_type="f32", plan=None, unquantized=path, exported=path)
    quantization = requested or default
    exported = folder / f"{source.role}-{quantization}.gguf"
    report = ExactReport() if quantization == "q4_0" and trained_for_q4(source.checkpoint) else None
    weight_type, unquantized = DIRECT.get(quantization), exported
    if weight_type is None:
        if report is None:
            library_version()
        weight_type = source.stored_type
        unquantized = folder / f"{source.role}-unquantized-{weight_type}.gguf"
    assert source.tokenizer is not None  # only a GGUF has none
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


def check_space(pair: GgufPair, folder: Path) -> None:
    """Raises ExportError if the disk has no room for the unquantized files and the bundle together."""
    needed = _SMALL_FILES_BYTES + sum(model.needed_bytes for model in pair.models)
    needed += pair.encoder.bytes if pair.encoder is not None else 0
    if pair.split:
        checkpoint = pair.drafter.source.checkpoint
        hidden = checkpoint.assistant.hidden_size
        needed += head_bytes(checkpoint, QUANTIZATIONS[pair.drafter.quantization].file_bytes(hidden, hidden)) + pair.drafter.exported_bytes
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ExportError(
            f"{folder.parent} has {free} bytes free, the export needs about {needed} (unquantized files and bundle together);"
            " free some space or choose another disk"
        )


def make_gguf(
    pair: GgufPair, request: ExportRequest, importance: Mapping[str, Importance], progress: Progress
) -> tuple[list[BundlePart], dict[str, Any]]:
    """Writes the GGUF files; returns them, and the manifest's `parity`. Raises ExportError."""
    for model in pair.models:
        _make_model(model, request.thread_count, importance.get(model.role), progress)
    parts = [_part(model.role, model.exported, model) for model in pair.models]
    if pair.split:
        parts += _make_split(pair.drafter, progress)
    encoder = None
    if pair.encoder is not None and request.media is not None:
        encoder = _make_encoder(pair, pair.encoder, request.media, progress)
        parts.append(encoder)
    parity = _parity(pair, encoder, request, progress)
    for model in pair.models:
        if not model.direct:
            model.unquantized.unlink(missing_ok=True)
    return parts, parity


def _part(role: str, path: Path, model: GgufModel) -> BundlePart:
    return BundlePart(role=role, path=path, format="gguf", quantization=model.quantization)


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


def _make_split(drafter: GgufModel, progress: Progress) -> list[BundlePart]:
    """Writes the split drafter, which llama.cpp alone cannot run, from the exported drafter, which it can."""
    checkpoint, folder = drafter.source.checkpoint, drafter.exported.parent
    body = folder / f"drafter-body-{drafter.quantization}.gguf"
    progress.step("Write the split drafter's body", None)
    write_body(checkpoint, drafter.exported, body, progress.advance)
    head = folder / f"drafter-head-{drafter.quantization}.gguf"
    rows = output_rows(drafter.exported)
    progress.step("Write the split drafter's head", head_bytes(checkpoint, rows.bytes // rows.shape[1]))
    write_head(checkpoint, drafter.exported, head, progress.advance)
    return [_part("drafter_body", body, drafter), _part("drafter_head", head, drafter)]


def _make_encoder(pair: GgufPair, plan: GgufPlan, weight_type: EncoderType, progress: Progress) -> BundlePart:
    path = pair.target.exported.parent / f"media-encoder-{weight_type}.gguf"
    progress.step(f"Convert the media encoder to {weight_type}", plan.bytes)
    plan.write(path, progress.advance)
    return BundlePart(role=MEDIA_ENCODER, path=path, format="gguf", quantization=weight_type)


def _parity(pair: GgufPair, encoder: BundlePart | None, request: ExportRequest, progress: Progress) -> dict[str, Any]:
    if not request.verify:
        return {"skipped": "it was switched off with --no-verify"}
    target, drafter = pair.models
    if target.plan is None or drafter.plan is None:
        existing = " and ".join(model.role for model in pair.models if model.plan is None)
        return {"skipped": f"the {existing} came as GGUF, without a checkpoint to compare with"}
    progress.step("Compare with the reference", None)
    compared = ParityRequest(
        **vars(reference_of(target.source, drafter.source, request.thread_count)),
        unquantized_target=target.unquantized,
        unquantized_drafter=drafter.unquantized,
        exported_target=target.exported,
        exported_drafter=drafter.exported,
        weight_types=(target.weight_type, drafter.weight_type),
        quantizations=(target.quantization, drafter.quantization),
        experts=target.source.checkpoint.architecture.experts,
    )
    figures = measure_parity(compared, progress.note)
    if encoder is None or "skipped" in figures:
        return figures
    inputs = media_inputs(media_architecture(target.source.checkpoint))
    return figures | {"media": encoder_parity(compared, encoder.path, encoder.quantization or "", inputs)}
