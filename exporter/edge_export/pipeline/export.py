"""The export: a target and its drafter in, a bundle out, in visible steps, whole or not at all."""

from __future__ import annotations

import datetime
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from edge_export.checkpoint.safetensors import FloatType
from edge_export.checkpoint.sources import ResolvedSource, manifest_source, resolve_pair, source_files
from edge_export.checkpoint.tensor_shapes import SPARSE_HEAD
from edge_export.checkpoint.tokenizer_vocabulary import TOKENIZER_NAME, read_vocabulary
from edge_export.errors import ExportError
from edge_export.gguf.split_body import write_body
from edge_export.gguf.split_head import can_split, head_bytes, output_rows, write_head
from edge_export.gguf.writer import gguf_bytes, write_gguf
from edge_export.onnx.request import Made, check_onnx_sources
from edge_export.output.atomic_folder import check_output, partial_folder, sync_files
from edge_export.output.replaceable_folder import check_outside
from edge_export.parity.gguf import ParityRequest, measure_parity
from edge_export.pipeline.cache_layout import architecture, cache_layout
from edge_export.pipeline.onnx_step import check_onnx_space, make_onnx, onnx_parity
from edge_export.pipeline.request import ExportRequest, Progress
from edge_export.pipeline.signing import read_signing_key, sign_manifest
from edge_export.quantization.importance import Importance
from edge_export.quantization.importance_sources import importance_of_pair
from edge_export.quantization.llama_quantize import DIRECT, WEIGHED, check_quantization, expected_bytes, library_version, quantize_gguf
from edge_runtime.bundle.bundle import Bundle, open_bundle
from edge_runtime.bundle.integrity import sha256_of
from edge_runtime.bundle.manifest import MANIFEST_NAME, SCHEMA_VERSION, BundleFile, Manifest, RuntimeSettings, Source
from edge_runtime.config.presets import expanded
from edge_runtime.config.schema import CacheConfig, DrafterConfig, SpeculativeConfig, VerifierConfig
from edge_runtime.config.settings import defaults
from edge_runtime.config.yaml_file import CONFIG_NAME, config_text

TARGET_QUANTIZATION = "q4_0"
DRAFTER_QUANTIZATION = "q8_0"
DEFAULT_CONTEXT = 4096
# Tokenizer, template, manifest: what a bundle holds beside the models.
_SMALL_FILES_BYTES = 64 << 20
_PIECE_BYTES = 4 << 20
_CHAT_TEMPLATE = "chat_template.jinja"
# Role, path, format and quantization of a file in the bundle.
_Part = tuple[str, Path, str, str | None]


@dataclass(frozen=True, kw_only=True)
class _Model:
    """One half on its way into the bundle: `unquantized` is written first, `exported` is the bundle's file (both may be the same)."""

    source: ResolvedSource
    quantization: str
    weight_type: FloatType
    unquantized: Path
    exported: Path

    @property
    def taken(self) -> bool:
        """Whether it is an existing GGUF."""
        return self.source.gguf is not None

    @property
    def direct(self) -> bool:
        """Whether our converter writes the bundle's file itself."""
        return self.unquantized == self.exported


def export_pair(request: ExportRequest, progress: Progress) -> Bundle:
    """Makes the bundle `request.output` and returns it, opened and checked.

    Raises ExportError (CheckpointError, ParityError); then nothing is left behind and a bundle that was there is as it was.
    """
    for quantization in (request.target_quantization, request.drafter_quantization):
        if quantization is not None:
            check_quantization(quantization)
    key = read_signing_key(request.sign) if request.sign is not None else None
    check_output(request.output, request.force)
    progress.step("Open the checkpoints", None)
    pair = target, drafter = resolve_pair(request.target, request.drafter)
    check_outside(request.output, [part.path for part in pair])
    if request.onnx is not None:
        check_onnx_sources(target, drafter)
    context = request.context or min(DEFAULT_CONTEXT, target.checkpoint.architecture.context)
    layout = cache_layout(target.checkpoint, drafter.checkpoint, context)
    split = request.gguf and drafter.gguf is None and can_split(target.checkpoint.architecture.hidden_size, drafter.checkpoint)
    sparse = split or (request.onnx is not None and drafter.checkpoint.assistant.ordered_embeddings)
    if request.config.drafter.sparse_output and not sparse:
        raise ExportError(f"{request.drafter} gives no split drafter, which drafter.sparse_output true asks for; leave that key out")
    left_out = [(part.role, name) for part in pair for name in part.checkpoint.left_out]
    if sparse:
        left_out = [(role, name) for role, name in left_out if not name.startswith(SPARSE_HEAD)]
    for role, name in left_out:
        progress.say(f"Left out of the {role}: {name}.")
    with partial_folder(request.output, request.force) as folder:
        models = _plan(request, pair, split, folder)
        if request.onnx is not None:
            check_onnx_space(pair, request.onnx, folder)
        importance = _importance(request, pair, models, progress)
        made = Made(parts=[], layout=layout)
        if request.onnx is not None:
            made = make_onnx(pair, layout, request.onnx, importance, folder, progress)
        parity = onnx_parity(request.onnx, request.verify, pair, made, folder, request.threads or _processors(), progress)
        if models:
            parts, measured = _make_gguf(request, models, split, importance, folder, progress)
            made.parts[:0], parity = parts, measured | parity
        files = _files(made.parts, _copy_texts(target, folder, progress), folder, progress)
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            created_by=f"edge-mtp {version('edge-mtp')}",
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            sources={part.role: _hashed_source(part, progress) for part in pair},
            architecture=architecture(target.checkpoint, drafter.checkpoint, context),
            cache_layout=made.layout,
            files=files,
            left_out=tuple(f"{role}: {name}" for role, name in left_out),
            parity=parity,
            importance={role: found.source for role, found in importance.items()},
            runtime=RuntimeSettings(context=context),
            onnx=made.graphs,
            static=made.static,
        )
        (folder / MANIFEST_NAME).write_bytes(manifest.to_json().encode())
        if key is not None:
            sign_manifest(folder, manifest.to_json().encode(), key)
        (folder / CONFIG_NAME).write_text(config_text(bundle_config(request.config, manifest)), encoding="utf-8")
        # The hashes were just computed from these very files; shape, sizes and layout are checked once more as a reader would.
        open_bundle(folder, check="none")
        # A power cut must not leave the bundle's name on half of its bytes, least of all where the old one is removed for it.
        progress.step("Write the bundle to the disk", None)
        sync_files(folder)
    return Bundle(request.output, manifest)


def _plan(request: ExportRequest, pair: tuple[ResolvedSource, ResolvedSource], split: bool, folder: Path) -> tuple[_Model, ...]:
    """The GGUF files to make, if any are wanted; refused if the disk has no room for them."""
    if not request.gguf:
        return ()
    models = (
        _planned(pair[0], request.target_quantization, TARGET_QUANTIZATION, folder),
        _planned(pair[1], request.drafter_quantization, DRAFTER_QUANTIZATION, folder),
    )
    check_space(models, folder, split)
    return models


def _make_gguf(
    request: ExportRequest, models: tuple[_Model, ...], split: bool, importance: dict[str, Importance], folder: Path, progress: Progress
) -> tuple[list[_Part], dict[str, Any]]:
    for model in models:
        _make(model, request.threads or _processors(), importance.get(model.source.role), progress)
    split_files = _make_split(models[1], folder, progress) if split else []
    parity = _parity(request, (models[0], models[1]), progress)
    for model in models:
        if not model.direct:
            model.unquantized.unlink(missing_ok=True)
    return [*((model.source.role, model.exported, "gguf", model.quantization) for model in models), *split_files], parity


def bundle_config(config: SpeculativeConfig, manifest: Manifest) -> SpeculativeConfig:
    """Returns what config.yaml says: `config` over the defaults, with the files and the context as they came out."""
    quantizations = {entry.role: entry.quantization for entry in reversed(manifest.files)}  # of two formats the first, as a reader finds it
    made = SpeculativeConfig(
        drafter=DrafterConfig(model=manifest.sources["drafter"].origin, precision=quantizations["drafter"]),
        verifier=VerifierConfig(model=manifest.sources["target"].origin, precision=quantizations["target"]),
        cache=CacheConfig(max_context_length=manifest.runtime.context),
    )
    whole = made.over(expanded(config)).over(defaults(manifest.runtime))
    # Every value is written out, so the preset's name would say nothing any more.
    return replace(whole, tuning=replace(whole.tuning, preset=None))


def check_space(models: tuple[_Model, ...], folder: Path, split: bool) -> None:
    """Raises ExportError if the disk has no room for the unquantized files and the bundle together."""
    needed = _SMALL_FILES_BYTES
    if split:
        quantization, checkpoint = models[1].quantization, models[1].source.checkpoint
        needed += head_bytes(checkpoint, expected_bytes(checkpoint.assistant.hidden_size, quantization))
        needed += expected_bytes(checkpoint.parameters, quantization)
    for model in models:
        if model.taken:
            needed += model.source.path.stat().st_size
            continue
        needed += gguf_bytes(model.source.checkpoint, model.weight_type, tokenizer_folder=model.source.tokenizer_folder)
        if not model.direct:
            needed += expected_bytes(model.source.checkpoint.parameters, model.quantization)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ExportError(
            f"{folder.parent} has {free} bytes free, the export needs about {needed} (unquantized files and bundle together);"
            " free some space or choose another disk"
        )


def _planned(source: ResolvedSource, wanted: str | None, default: str, folder: Path) -> _Model:
    if source.quantization is not None:
        if wanted not in (None, source.quantization):
            raise ExportError(
                f"{source.origin} is a GGUF and taken as it is ({source.quantization}); leave --{source.role}-quant out, or give the checkpoint"
            )
        path = folder / f"{source.role}-{source.quantization}.gguf"
        return _Model(source=source, quantization=source.quantization, weight_type="f32", unquantized=path, exported=path)
    quantization = wanted or default
    exported = folder / f"{source.role}-{quantization}.gguf"
    direct = DIRECT.get(quantization)
    if direct is not None:
        return _Model(source=source, quantization=quantization, weight_type=direct, unquantized=exported, exported=exported)
    library_version()
    weight_type = source.stored_type
    unquantized = folder / f"{source.role}-unquantized-{weight_type}.gguf"
    return _Model(source=source, quantization=quantization, weight_type=weight_type, unquantized=unquantized, exported=exported)


def _importance(
    request: ExportRequest, pair: tuple[ResolvedSource, ResolvedSource], models: tuple[_Model, ...], progress: Progress
) -> dict[str, Importance]:
    weighing = request.weighing
    if not weighing.wanted:
        return {}
    text = weighing.calibrate
    title = f"Calibrate on {text.name}" if text else "Read the importance matrix"
    progress.step(title, text.stat().st_size if text and text.is_file() else None)
    weighed = {model.source.role for model in models if model.quantization in WEIGHED and not model.taken}
    if request.onnx is not None:
        weighed |= request.onnx.weighed
    return importance_of_pair(
        weighing, {part.role: part for part in pair}, sorted(weighed), request.threads or _processors(), progress.advance
    )


def _make(model: _Model, threads: int, importance: Importance | None, progress: Progress) -> None:
    source = model.source
    if model.taken:
        progress.step(f"Copy the {source.role}", source.path.stat().st_size)
        _copy(source.path, model.exported, progress.advance)
        return
    total = gguf_bytes(source.checkpoint, model.weight_type, tokenizer_folder=source.tokenizer_folder)
    progress.step(f"Convert the {source.role} to {model.weight_type}", total)
    write_gguf(source.checkpoint, model.unquantized, model.weight_type, progress.advance, tokenizer_folder=source.tokenizer_folder)
    if not model.direct:
        progress.step(
            f"Quantize the {source.role} to {model.quantization}", expected_bytes(source.checkpoint.parameters, model.quantization)
        )
        quantize_gguf(model.unquantized, model.exported, model.quantization, threads, progress.advance, importance)


def _make_split(drafter: _Model, folder: Path, progress: Progress) -> list[_Part]:
    """Writes the split drafter, which llama.cpp alone cannot run, beside the finished one, which it can."""
    checkpoint = drafter.source.checkpoint
    body = folder / f"drafter-body-{drafter.quantization}.gguf"
    progress.step("Write the split drafter's body", None)
    write_body(checkpoint, drafter.exported, body, progress.advance)
    head = folder / f"drafter-head-{drafter.quantization}.gguf"
    rows = output_rows(drafter.exported)
    progress.step("Write the split drafter's head", head_bytes(checkpoint, rows.bytes // rows.shape[1]))
    write_head(checkpoint, drafter.exported, head, progress.advance)
    return [("drafter_body", body, "gguf", drafter.quantization), ("drafter_head", head, "gguf", drafter.quantization)]


def _parity(request: ExportRequest, models: tuple[_Model, _Model], progress: Progress) -> dict[str, Any]:
    if not request.verify:
        return {"skipped": "it was switched off with --no-verify"}
    target, drafter = models
    tokenizer_folder = target.source.tokenizer_folder
    if target.taken or drafter.taken or tokenizer_folder is None:
        taken = " and ".join(model.source.role for model in models if model.taken)
        return {"skipped": f"the {taken} came as GGUF, without a checkpoint to compare with"}
    progress.step("Compare with the reference", None)
    return measure_parity(
        ParityRequest(
            target_folder=target.source.path,
            drafter_folder=drafter.source.path,
            tokenizer_folder=tokenizer_folder,
            unquantized_target=target.unquantized,
            unquantized_drafter=drafter.unquantized,
            exported_target=target.exported,
            exported_drafter=drafter.exported,
            weight_types=(target.weight_type, drafter.weight_type),
            quantizations=(target.quantization, drafter.quantization),
            parameters=target.source.checkpoint.parameters + drafter.source.checkpoint.parameters,
            window=target.source.checkpoint.architecture.window,
            context=target.source.checkpoint.architecture.context,
            threads=request.threads or _processors(),
        ),
        progress.say,
    )


def _copy_texts(target: ResolvedSource, folder: Path, progress: Progress) -> list[tuple[str, Path]]:
    """Puts tokenizer and chat template into the bundle; returns (role, path) of each. A GGUF carries its tokenizer itself."""
    progress.step("Copy the tokenizer", None)
    made: list[tuple[str, Path]] = []
    template: str | None = None
    if target.gguf is not None:
        found = target.gguf.keys.get("tokenizer.chat_template")
        template = found if isinstance(found, str) else None
    elif target.tokenizer_folder is not None:
        made.append(("tokenizer", folder / TOKENIZER_NAME))
        _copy(target.tokenizer_folder / TOKENIZER_NAME, folder / TOKENIZER_NAME, lambda _: None)
        template = read_vocabulary(target.tokenizer_folder).chat_template
    if template is not None:
        made.append(("chat_template", folder / _CHAT_TEMPLATE))
        (folder / _CHAT_TEMPLATE).write_text(template, encoding="utf-8", newline="")
    return made


def _files(parts: list[_Part], texts: list[tuple[str, Path]], folder: Path, progress: Progress) -> tuple[BundleFile, ...]:
    progress.step("Hash the bundle", None)
    entries = [*parts, *((role, path, path.suffix[1:], None) for role, path in texts)]
    return tuple(
        BundleFile(
            path=path.relative_to(folder).as_posix(),
            role=role,
            format=kind,
            bytes=path.stat().st_size,
            sha256=sha256_of(path),
            quantization=quantization,
        )
        for role, path, kind, quantization in entries
    )


def _hashed_source(source: ResolvedSource, progress: Progress) -> Source:
    progress.step(f"Hash the {source.role}'s source", sum(path.stat().st_size for path in source_files(source)))
    return manifest_source(source, progress.advance)


def _copy(source: Path, destination: Path, progress: Callable[[int], None]) -> None:
    with source.open("rb") as reader, destination.open("wb") as writer:
        while piece := reader.read(_PIECE_BYTES):
            writer.write(piece)
            progress(len(piece))


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
