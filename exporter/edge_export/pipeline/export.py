"""Exports a pair: reads it and writes a bundle, which appears complete or not at all. Also plans an export without writing it."""

from __future__ import annotations

import contextlib
import datetime
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edge_devices.errors import byte_text, errors_as
from edge_devices.waiting import Progress, ProgressLines
from edge_export.checkpoint.architecture import SPARSE_HEAD
from edge_export.checkpoint.hub import fetched_checkpoint
from edge_export.checkpoint.media_architecture import TOWERS, media_architecture, media_inputs
from edge_export.checkpoint.sources import ResolvedSource, mixed_training, planned_download, planned_pair, resolve_pair
from edge_export.checkpoint.tokenizer_vocabulary import TOKENIZER_NAME
from edge_export.errors import ExportError
from edge_export.gguf.writer import trained_for_q4
from edge_export.onnx.request import ONNX_MEDIA, OnnxFiles, OnnxRequest, check_onnx_sources, check_towers, expected_onnx_bytes
from edge_export.output import check_output, check_outside, partial_folder, sync_files
from edge_export.parity.reference import Reference, why_no_reference
from edge_export.pipeline.bundle_files import (
    architecture,
    bundle_config,
    cache_layout,
    copy_texts,
    generation_defaults,
    hash_parts,
    hash_source,
    read_signing_key,
    sign_manifest,
    template_of,
)
from edge_export.pipeline.gguf_step import GgufFiles, make_gguf, plan_pair, planned_head_bytes
from edge_export.pipeline.publish import write_companions
from edge_export.pipeline.request import DEFAULT_CONTEXT, DRAFTER_QUANTIZATION, SWITCHED_OFF, TARGET_QUANTIZATION, ExportJob, ExportRequest
from edge_export.quantization.calibration import CALIBRATION_TEXT, LAYERS_FILE, calibrated_by_default, expected_minutes, importance_of_pair
from edge_export.quantization.gguf_quantization import DIRECT, check_quantization, library_version
from edge_export.quantization.importance import Importance
from edge_runtime.bundle.bundle import Bundle, open_bundle
from edge_runtime.bundle.gguf_header import QUANTIZATIONS
from edge_runtime.bundle.manifest import MANIFEST_NAME, SCHEMA_VERSION, BundleFile, Manifest, RuntimeSettings
from edge_runtime.config.settings import CONFIG_NAME, config_text

# Room for the manifest, configuration, model card and presets.
_TEXT_BYTES = 64 << 10


def export_pair(request: ExportRequest, progress: Progress | Callable[[str], None] | None = None) -> Bundle:
    """Writes the bundle `request.output` and returns it, opened and checked.

    `progress` is a `Progress`, or a function such as `print` that gets a line for each step. With None, nothing is reported.

    Raises ExportError (CheckpointError, ParityError). In that case the output folder is not created, and an existing bundle is unchanged.
    """
    if not isinstance(progress, Progress):
        progress = ProgressLines() if progress is None else ProgressLines(progress)
    for quantization in (request.target_quantization, request.drafter_quantization):
        if quantization is not None:
            check_quantization(quantization)
    key = read_signing_key(request.sign) if request.sign is not None else None
    check_output(request.output, request.force)
    _check_tools(request)
    progress.step("Open the checkpoints", None)
    job = _open_job(request, progress)
    if (sentence := mixed_training(*job.pair)) is not None:
        progress.note(sentence)
    job = with_tuned_drafter(job)
    for role, name in job.left_out:
        progress.note(f"Left out of the {role}: {name}.")
    with _kept_calibration(job), partial_folder(request.output, request.force) as folder:
        gguf = plan_pair(job, folder) if request.gguf else None
        _check_space(job, gguf, folder)
        importance = _importance(job, gguf)
        onnx, onnx_figures = _make_onnx(job, importance, folder)
        gguf_parts, gguf_figures = make_gguf(gguf, job, importance) if gguf is not None else ([], {})
        parts = [*gguf_parts, *(onnx.parts if onnx is not None else ()), *copy_texts(job.pair[0], job.template, folder, progress)]
        weights = {source.role: source.checkpoint.parameters for source in job.pair}
        files = hash_parts(parts, folder, weights, progress)
        manifest = _manifest(job, files, onnx, parity=gguf_figures | onnx_figures, importance=importance)
        (folder / MANIFEST_NAME).write_bytes(manifest.to_json().encode())
        if key is not None:
            sign_manifest(folder, manifest.to_json().encode(), key)
        (folder / CONFIG_NAME).write_text(config_text(bundle_config(request.config, manifest)), encoding="utf-8")
        write_companions(folder, manifest)
        # Names, sizes and layout are checked as a reader does. Hashes are not, because they were just computed from these files.
        open_bundle(folder, check="none")
        # After a power cut, the bundle's name must not belong to incomplete files, especially if it replaced an old bundle.
        progress.step("Write the bundle to the disk", None)
        sync_files(folder)
    clear_tuning(request)
    return Bundle(request.output, manifest)


def _check_tools(request: ExportRequest) -> None:
    """Raises ExportError if a package that the export needs is missing, before anything is downloaded."""
    if request.onnx is not None and find_spec("onnx") is None:
        raise ExportError("onnx is not installed; pip install 'edge-mtp[export-onnx]' to write ONNX graphs")
    halves = ((request.target, request.target_quantization), (request.drafter, request.drafter_quantization))
    # A GGUF is only copied. Weights that were trained for q4_0 may need no llama.cpp, which is known only when they are here.
    if request.gguf and any(quantization not in DIRECT and fetched_checkpoint(origin) for origin, quantization in halves):
        library_version()


def _open_job(request: ExportRequest, progress: Progress) -> ExportJob:
    """Opens the pair and checks the request against it. Raises ExportError."""
    pair = target, drafter = resolve_pair(request.target, request.drafter, progress)
    check_outside(request.output, [part.path for part in pair])
    check_rounding(request, pair)
    if request.onnx is not None:
        check_onnx_sources(target, drafter, request.onnx)
        onnx = request.onnx if request.media is None else replace(request.onnx, media=ONNX_MEDIA[request.media])
        if onnx.mixed(onnx.target) and not target.checkpoint.rounding and trained_for_q4(target.checkpoint):
            # int4 in blocks of 32 stores these weights exactly; the default mix, which has larger blocks, does not.
            onnx = replace(onnx, block=32, on_grid=True)
        request = replace(request, onnx=onnx)
    context = request.context or min(DEFAULT_CONTEXT, target.checkpoint.architecture.context)
    layout = cache_layout(target.checkpoint, drafter.checkpoint, context)
    ordered = drafter.checkpoint.assistant.ordered_embeddings
    sparse_head = request.gguf and drafter.gguf is None and ordered
    sparse = sparse_head or (request.onnx is not None and ordered)
    if request.config.drafter.sparse_output and not sparse:
        raise ExportError(f"{request.drafter} gives no split drafter, which drafter.sparse_output true asks for; leave that key out")
    if request.media is not None and target.gguf is not None:
        raise ExportError(
            f"{request.target} is a GGUF, which has no towers for images and sound; give the checkpoint, or leave --media out"
        )
    media = None if request.media is None else media_architecture(target.checkpoint)
    if media is not None and request.onnx is not None:
        check_towers(media)
    written = (*((SPARSE_HEAD,) if sparse else ()), *(TOWERS if media is not None else ()))
    return ExportJob(
        request=request,
        progress=progress,
        reference=Reference(target=target, drafter=drafter, threads=request.thread_count, context=context),
        context=context,
        layout=layout,
        sparse_head=sparse_head,
        left_out=tuple((part.role, name) for part in pair for name in part.checkpoint.left_out if not name.startswith(written)),
        media=None if media is None else media_inputs(media),
        generation=generation_defaults(target),
        template=template_of(target),
    )


def _check_space(job: ExportJob, gguf: GgufFiles | None, folder: Path) -> None:
    """Raises ExportError if the disk has no room for what the export writes."""
    tokenizer = job.pair[0].tokenizer
    needed = _TEXT_BYTES + len((job.template or "").encode())
    needed += 0 if tokenizer is None else (tokenizer.folder / TOKENIZER_NAME).stat().st_size
    needed += gguf.needed_bytes if gguf is not None else 0
    needed += _onnx_bytes(job, job.request.onnx) if job.request.onnx is not None else 0
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ExportError(
            f"{folder.parent} has {byte_text(free)} free, the export needs about {byte_text(needed)}"
            " (unquantized files and bundle together); free some space or choose another disk"
        )


def _onnx_bytes(job: ExportJob, request: OnnxRequest) -> int:
    target, drafter = job.pair
    return expected_onnx_bytes(target.checkpoint, drafter.checkpoint, request)


def calibration_folder(request: ExportRequest) -> Path:
    """Returns the folder of a calibration's state, from which the next call continues."""
    return request.output.absolute().with_name(f"{request.output.name}.calibration")


@contextlib.contextmanager
def _kept_calibration(job: ExportJob) -> Iterator[None]:
    """Removes a calibration's state, but keeps it and says where it is if the export fails after at least one layer."""
    folder = calibration_folder(job.request)
    existed = folder.exists()
    try:
        yield
    except BaseException:
        if (folder / LAYERS_FILE).is_file():
            job.progress.note(f"The calibration is kept in {folder}; the next export of this model to the same place continues it.")
        elif not existed:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if (folder / LAYERS_FILE).is_file():
        shutil.rmtree(folder, ignore_errors=True)


def _importance(job: ExportJob, gguf: GgufFiles | None) -> dict[str, Importance]:
    sources, onnx = job.request.importance, job.request.onnx
    roles = dict(onnx.importance_roles) if onnx is not None else {}
    for role, without in (gguf.importance_roles if gguf is not None else {}).items():
        other = roles.get(role)
        roles[role] = without if other is None else without & other
    trained = onnx is not None and onnx.on_grid
    if not trained and calibrated_by_default(sources, job.reference, roles, job.progress.note):
        sources, roles = replace(sources, calibrate=CALIBRATION_TEXT), {"target": roles["target"]}
        minutes = expected_minutes(job.reference, roles["target"] or frozenset())
        job.progress.note(f"Calibrating the model takes about {minutes:.0f} minutes here; --no-calibrate leaves it out.")
    if not sources.are_given:
        return {}
    text = sources.calibrate
    title = f"Calibrate on {text.name}" if text else "Read the importance matrix"
    job.progress.step(title, text.stat().st_size if text and text.is_file() else None)
    state, progress = calibration_folder(job.request), job.progress
    return importance_of_pair(sources, job.reference, roles, state=state, progress=progress.advance, notify=progress.note)


def _make_onnx(job: ExportJob, importance: dict[str, Importance], folder: Path) -> tuple[OnnxFiles | None, dict[str, Any]]:
    """Writes the ONNX files and returns them with their part of the manifest's `parity`; None and {} if no graphs are requested."""
    request, progress = job.request.onnx, job.progress
    if request is None:
        return None, {}
    with errors_as(ExportError, "onnx is not installed", "pip install 'edge-mtp[export]' to write ONNX graphs", ImportError):
        from edge_export.onnx.export import compare, write_onnx
    progress.step("Write the ONNX graphs", _onnx_bytes(job, request))
    files = write_onnx(*job.pair, request, layout=job.layout, importance=importance, folder=folder, progress=progress.advance)
    if not job.request.verify:
        return files, {"onnx": dict(SWITCHED_OFF)}
    progress.step("Compare the ONNX graphs with the reference", None)
    calibrated = any(each.source.kind == "calibration" for each in importance.values())
    return files, {"onnx": compare(job.reference, files, request, job.media, folder, calibrated=calibrated)}


def _manifest(
    job: ExportJob, files: tuple[BundleFile, ...], onnx: OnnxFiles | None, *, parity: dict[str, Any], importance: dict[str, Importance]
) -> Manifest:
    target, drafter = job.pair
    return Manifest(
        schema_version=SCHEMA_VERSION,
        created_by=f"edge-mtp {version('edge-mtp')}",
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        files=files,
        sources={part.role: hash_source(part, job.progress) for part in job.pair},
        architecture=architecture(target.checkpoint, drafter.checkpoint, job.context),
        cache_layout=job.layout if onnx is None else onnx.layout,
        left_out=tuple(f"{role}: {name}" for role, name in job.left_out),
        parity=parity,
        acceptance=job.request.acceptance,
        importance={role: fitted.source for role, fitted in importance.items()},
        runtime=RuntimeSettings(context=job.context),
        onnx=None if onnx is None else onnx.graphs,
        static=None if onnx is None else onnx.static,
        media=job.media,
        generation=job.generation,
        tuning=job.tuning,
        description=job.request.description,
    )


def check_rounding(request: ExportRequest, pair: tuple[ResolvedSource, ResolvedSource]) -> None:
    """Raises ExportError if a checkpoint rounds activations by fixed scales and a requested format cannot do that."""
    for source in pair:
        if not source.checkpoint.rounding:
            continue
        if request.gguf or (request.onnx is not None and request.onnx.device is not None):
            what = "GGUF files cannot" if request.gguf else "graphs of fixed shapes do not"
            raise ExportError(
                f"{source.origin} rounds its activations too, which {what}, and without that its answers get much worse;"
                " export it with --format onnx, or give the -it-qat-q4_0-unquantized checkpoint"
            )
        if request.importance.are_given:
            raise ExportError(f"{source.origin} is quantized already; leave --calibrate and the importance matrices out")


def with_tuned_drafter(job: ExportJob) -> ExportJob:
    """Tunes the drafter if requested, and returns the job with the tuned one.

    Returns the job unchanged if no tuning is requested, or if the original drafter is as good. The state is in a folder beside the output,
    so that a stopped call can be continued. Raises ExportError.
    """
    request, progress, (target, drafter) = job.request, job.progress, job.pair
    if request.tune_drafter is None:
        return job
    if target.gguf is not None or drafter.gguf is not None:
        named = target if target.gguf is not None else drafter
        raise ExportError(f"tuning trains the drafter in transformers, and {named.origin} is a GGUF; give its checkpoint")
    parameters = target.checkpoint.parameters + 4 * drafter.checkpoint.parameters  # weights, gradients, and the optimizer's two sums
    if (reason := why_no_reference(parameters)) is not None:
        raise ExportError(f"tuning trains the drafter in transformers, but {reason}")
    # Imported here because it imports torch, which only a tuning needs.
    from edge_export.tuning import TuningRequest, tune

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
    """Returns the folder of a tuning's state."""
    return request.output.absolute().with_name(f"{request.output.name}.tuning")


def clear_tuning(request: ExportRequest) -> None:
    """Removes a tuning's state, once the bundle is complete."""
    if request.tune_drafter is not None:
        shutil.rmtree(tuning_folder(request), ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class PlannedExport:
    """What an export would write, download and need.

    `manifest` has approximate file sizes. `download_bytes` are from the hub's listing if `listed`, else estimated from the configs.
    `disk_bytes` is the approximate disk space that the export needs, for the bundle and for unquantized files beside it.
    """

    manifest: Manifest
    download_bytes: int
    listed: bool
    disk_bytes: int

    def lines(self) -> list[str]:
        """Returns the download and the disk space as two sentences."""
        label = "by the hub's listing" if self.listed else "estimated from the config: the text model in 16 bits, without images and sound"
        fetched = f"{byte_text(self.download_bytes)} ({label})" if self.download_bytes else "nothing, its files are here"
        return [
            f"To download: {fetched}.",
            f"Free disk for the export: about {byte_text(self.disk_bytes)}, the bundle and the unquantized files that it is made from.",
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "download_bytes": self.download_bytes,
            "download_from": "listing" if self.listed else "config",
            "disk_bytes": self.disk_bytes,
        }


def planned_export(
    target: str,
    drafter: str,
    *,
    target_quantization: str | None = None,
    drafter_quantization: str | None = None,
    context: int | None = None,
) -> PlannedExport:
    """Plans an export to GGUF files. Raises ExportError (CheckpointError).

    Weights are not needed. From a hub repository, only config.json is downloaded. E2B, E4B, 12B, 26B-A4B and 31B are built in.
    """
    first, second = planned_pair(target, drafter)
    for source in (first, second):
        if source.checkpoint.rounding:
            raise ExportError(
                f"{source.origin} rounds its activations, which GGUF files cannot, and a plan is about GGUF files;"
                " plan the -it-qat-q4_0-unquantized checkpoint, or export this one with --format onnx"
            )
    context = context or min(DEFAULT_CONTEXT, first.checkpoint.architecture.context)
    facts = architecture(first.checkpoint, second.checkpoint, context)
    quantization = drafter_quantization or DRAFTER_QUANTIZATION
    files = [_file(first, target_quantization or TARGET_QUANTIZATION), _file(second, quantization)]
    if second.gguf is None and second.checkpoint.assistant.ordered_embeddings:
        files.append(_entry("drafter_head", quantization, planned_head_bytes(second.checkpoint, quantization)))
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        created_by="plan",
        created_at="",
        sources={},
        architecture=facts,
        cache_layout=cache_layout(first.checkpoint, second.checkpoint, context),
        files=tuple(files),
        runtime=RuntimeSettings(context=context),
    )
    downloads = [planned_download(source) for source in (first, second)]
    unquantized = sum(_unquantized_bytes(source, file) for source, file in zip((first, second), files, strict=False))
    return PlannedExport(
        manifest=manifest,
        download_bytes=sum(size for size, _ in downloads),
        listed=all(listed for _, listed in downloads),
        disk_bytes=unquantized + sum(file.bytes for file in files),
    )


def _unquantized_bytes(source: ResolvedSource, file: BundleFile) -> int:
    """Returns the size of the file that llama.cpp quantizes to this one; 0 if the exporter copies the file or writes it itself."""
    if source.gguf is not None or file.quantization in DIRECT:
        return 0
    return QUANTIZATIONS[source.stored_type].file_bytes(source.checkpoint.parameters, source.checkpoint.architecture.table_weights)


def _file(source: ResolvedSource, quantization: str) -> BundleFile:
    if source.quantization is not None:
        return _entry(source.role, source.quantization, source.path.stat().st_size)
    check_quantization(quantization)
    weights, tables = source.checkpoint.parameters, source.checkpoint.architecture.table_weights
    if tables > weights:
        raise ExportError(f"{source.origin} has {weights} weights, fewer than its tables of {tables}; check its config.json")
    return _entry(source.role, quantization, QUANTIZATIONS[quantization].file_bytes(weights, tables))


def _entry(role: str, quantization: str, size: int) -> BundleFile:
    return BundleFile(path=f"{role}.gguf", role=role, format="gguf", bytes=size, sha256="", quantization=quantization)
