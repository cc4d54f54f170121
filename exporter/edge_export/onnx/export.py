"""The ONNX half of an export: graphs, their external data, and their facts for the manifest. See docs/bundle.md."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edge_export.checkpoint.architecture import FULL, SLIDING, TextArchitecture
from edge_export.checkpoint.published.formats import rounds_activations
from edge_export.checkpoint.sources import ResolvedSource
from edge_export.checkpoint.tokenizer_vocabulary import CONTROL, TOKENIZER_NAME
from edge_export.gguf.media_encoder import media_architecture, media_inputs
from edge_export.onnx.graph_builder import OPSET
from edge_export.onnx.graphs.attention import reads_rows
from edge_export.onnx.graphs.drafter import write_drafter
from edge_export.onnx.graphs.kv import KvFormat, fit_scales, store_kv
from edge_export.onnx.graphs.target import TargetFormats, write_target
from edge_export.onnx.media.export import write_encoders
from edge_export.onnx.parity import OnnxPair, OnnxParityRequest, encoder_parity, measure_onnx_parity, measure_rows, onnx_why_not
from edge_export.onnx.request import OnnxFiles, OnnxRequest, check_onnx_sources
from edge_export.onnx.weight_formats import head_format, layers_format, quantization_name, table_format, weight_format
from edge_export.onnx.weights import WeightFile
from edge_export.output.atomic_folder import BundlePart
from edge_export.parity.reference import ReferenceRequest
from edge_export.quantization.importance import Importance
from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH, CacheBuffer, CacheLayout, OnnxGraphs, Rotation

# Spare rows of a sliding buffer: they hold the longest forward, and the more there are, the more rarely rows move to the front.
SPARE_ROWS = 256
# llama.cpp ends a generation at these too (src/llama-vocab.cpp).
_END_PIECES = ("<eos>", "<turn|>", "<|tool_response>")


def write_onnx(
    target: ResolvedSource,
    drafter: ResolvedSource,
    request: OnnxRequest,
    *,
    layout: CacheLayout,
    importance: Mapping[str, Importance],
    folder: Path,
    progress: Callable[[int], None],
) -> OnnxFiles:
    """Writes graphs and data files into `folder`; `progress` gets the bytes written since its last call.

    Raises ExportError, CheckpointError.
    """
    check_onnx_sources(target, drafter)
    first, second = target.checkpoint, drafter.checkpoint
    formats = TargetFormats(layers=layers_format(request), embedding=table_format(request), soft_rows=request.media is not None)
    paths = {
        role: folder / f"{role.replace('_', '-')}-{quantization_name(role, request)}.onnx" for role in ("target", "target_head", "drafter")
    }
    data = {role: paths[role].with_suffix(".onnx_data") for role in ("target", "drafter")}
    with WeightFile(data["target"], progress, importance.get("target")) as weights:
        formats = dataclasses.replace(formats, kv=store_kv(request.kv, first, weights))
        table, contrib_ops = write_target(first, weights, paths["target"], paths["target_head"], formats)
    with WeightFile(data["drafter"], progress, importance.get("drafter")) as weights:
        contrib_ops |= write_drafter(
            first.architecture,
            layout.drafter_sources,
            second,
            weights,
            paths["drafter"],
            table=table,
            format=weight_format(request.drafter, request),
            head_format=head_format(request),
            kv=formats.kv,
        )
    encoders, encoder_ops = write_encoders(first, request.media, folder, progress) if request.media is not None else ((), set())
    files = OnnxFiles(
        parts=(
            *encoders,
            *(onnx_part(role, path, "onnx", request) for role, path in paths.items()),
            *(onnx_part(f"{role}_data", path, "onnx_data", request) for role, path in data.items()),
        ),
        layout=dataclasses.replace(layout, buffers=_buffers(first.architecture, layout, formats.kv)),
        graphs=onnx_facts(target, contrib_ops | encoder_ops),
    )
    if request.kv == "int8":
        rows = measure_rows(onnx_pair(target, files))
        fit_scales(formats.kv, data["target"], files.layout.buffers, files.graphs.rotations, rows)
    return files


def onnx_part(role: str, path: Path, kind: str, request: OnnxRequest) -> BundlePart:
    """A written graph or data file with its quantization's name."""
    return BundlePart(role=role, path=path, format=kind, quantization=quantization_name(role, request))


def onnx_pair(target: ResolvedSource, files: OnnxFiles) -> OnnxPair:
    """Written graphs with what is needed to run them."""
    assert target.tokenizer is not None
    model = target.checkpoint.architecture
    return OnnxPair(
        files=files.paths,
        layout=files.layout,
        graphs=files.graphs,
        static=files.static,
        tokenizer=target.tokenizer.folder / TOKENIZER_NAME,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
    )


def compare(
    target: ResolvedSource, drafter: ResolvedSource, files: OnnxFiles, request: OnnxRequest, *, folder: Path, threads: int
) -> dict[str, Any]:
    """Compares written graphs with the reference. If their weights are not float32, float32 graphs are written, compared and removed too.

    Returns the figures for the manifest, or {"skipped": reason}. Raises ParityError.
    """
    model, reference = target.checkpoint.architecture, onnx_reference(target, drafter, threads)
    plain_request = OnnxRequest(target="f32", drafter="f32")
    reason = onnx_why_not(reference)
    rounded = rounds_activations(target.checkpoint.config)
    if rounded == "compressed-tensors":
        reason = "the reference does not round activations of compressed-tensors checkpoints here"
    if reason is None and request != plain_request:
        free, needed = shutil.disk_usage(folder).free, 4 * reference.parameters
        reason = f"the float32 graphs need {needed} bytes of disk, {free} are free" if needed > free else None
    if reason is not None:
        return {"skipped": reason}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        plain = files
        if request != plain_request:
            plain = write_onnx(
                target, drafter, plain_request, layout=files.layout, importance={}, folder=Path(scratch), progress=lambda _: None
            )
        figures = measure_onnx_parity(
            OnnxParityRequest(
                **vars(reference),
                plain=plain.paths,
                exported=files.paths,
                layout=files.layout,
                plain_layout=plain.layout,
                graphs=onnx_facts(target, set()),
                hidden_size=model.hidden_size,
                vocab_size=model.vocab_size,
                weights=request.target,
                kv=request.kv,
                rounded=rounded is not None,
            )
        )
    if request.media is None:
        return figures
    inputs = media_inputs(media_architecture(target.checkpoint))
    return figures | {"media": encoder_parity(reference, files.paths, request.media, inputs, model.hidden_size)}


def onnx_reference(target: ResolvedSource, drafter: ResolvedSource, threads: int) -> ReferenceRequest:
    """Returns what transformers has to run to compare the graphs of a pair."""
    model = target.checkpoint.architecture
    assert target.tokenizer is not None
    return ReferenceRequest(
        target_folder=target.path,
        drafter_folder=drafter.path,
        tokenizer_folder=target.tokenizer.folder,
        parameters=target.checkpoint.parameters + drafter.checkpoint.parameters,
        window=model.window,
        context=model.context,
        threads=threads,
        target_weights=target.checkpoint.weights,
        drafter_weights=drafter.checkpoint.weights,
    )


def onnx_facts(target: ResolvedSource, contrib_ops: set[str]) -> OnnxGraphs:
    """Returns the manifest's facts of a pair's graphs."""
    assert target.tokenizer is not None  # resolve_pair rejects a checkpoint without one
    model, vocabulary = target.checkpoint.architecture, target.tokenizer
    ends = {vocabulary.pieces.index(piece) for piece in _END_PIECES if piece in vocabulary.pieces}
    if "eos" in vocabulary.special_ids:
        ends.add(vocabulary.special_ids["eos"])
    return OnnxGraphs(
        opset=OPSET,
        contrib_ops=tuple(sorted(contrib_ops)),
        rotations=_rotations(model),
        context=model.context,
        bos_token=vocabulary.special_ids.get("bos"),
        eos_token=vocabulary.special_ids.get("eos"),
        eog_tokens=tuple(sorted(ends)),
        control_tokens=tuple(sorted(ends | {token for token, kind in enumerate(vocabulary.types) if kind == CONTROL})),
    )


def _rotations(model: TextArchitecture) -> tuple[Rotation, ...]:
    """Full layers rotate the first pairs only (transformers, modeling_rope_utils.py, proportional)."""
    full = model.full_head_dim
    rotated = int(model.full_rotary_share * full // 2)
    found = [Rotation(kind="full", base=model.full_rope_base, head_dim=full, rotated_pairs=rotated)]
    if SLIDING in model.layer_types:
        found.append(Rotation(kind="sliding", base=model.sliding_rope_base, head_dim=model.head_dim, rotated_pairs=model.head_dim // 2))
    return tuple(found)


def _buffers(model: TextArchitecture, layout: CacheLayout, kv: KvFormat) -> tuple[CacheBuffer, ...]:
    sliding = model.window + 1 + layout.rewind_slack + SPARE_ROWS
    rows = {SLIDING: sliding, FULL: layout.full.capacity + MAX_DRAFT_LENGTH + 1}
    return tuple(
        CacheBuffer(
            layer=layer,
            kind="sliding" if model.is_sliding(layer) else "full",
            key=f"key.{layer}",
            value=f"value.{layer}",
            kv_heads=model.kv_heads_of(layer),
            head_dim=model.head_dim_of(layer),
            dtype=kv.type,
            rows=rows[model.layer_types[layer]],
            read=_read(reads_rows(model, layer)),
            drafter_read=_read(reads_rows(model, layer, drafter=True)),
        )
        for layer in range(model.owning_layers)
    )


def _read(by_rows: bool) -> str:
    return "rows" if by_rows else "buffer"
