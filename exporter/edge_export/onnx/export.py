"""The ONNX part of an export: the graphs, their external data, and the manifest's facts about them. See docs/design/onnx-graphs.md."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_devices.errors import byte_text
from edge_export.checkpoint.architecture import FULL, SLIDING, TextArchitecture
from edge_export.checkpoint.sources import ResolvedSource
from edge_export.checkpoint.tokenizer_vocabulary import CONTROL
from edge_export.onnx.graph_builder import OPSET, PlainGraph
from edge_export.onnx.graphs.attention import KV_TYPES, fit_scales, store_kv
from edge_export.onnx.graphs.drafter import DrafterWeights, store_drafter, write_drafter
from edge_export.onnx.graphs.target import TargetFormats, TargetWeights, store_target, write_target
from edge_export.onnx.media import write_encoders
from edge_export.onnx.parity import encoder_parity, measure_onnx_parity, measure_rows
from edge_export.onnx.request import WEIGHT_TYPES, OnnxFiles, OnnxRequest, expected_onnx_bytes, reads_rows
from edge_export.onnx.static import STATIC_ROWS, static_facts, write_calibrated, write_static, write_tables
from edge_export.onnx.weights import PlainWeightFile, WeightFile, head_format, layers_format, quantization_name, table_format, weight_format
from edge_export.output import BundlePart
from edge_export.parity.reference import Reference, why_not
from edge_export.quantization.importance import Importance
from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH, CacheBuffer, CacheLayout, MediaInputs, OnnxGraphs, Rotation

# Spare rows of a sliding buffer. They must hold the longest forward. The more there are, the more rarely rows are moved to the front.
SPARE_ROWS = 256
# Pieces that end a generation, besides the tokenizer's EOS. llama.cpp recognizes the same ones by their text (src/llama-vocab.cpp).
# fmt: off
_END_PIECES = frozenset((
    "<eos>", "<turn|>", "<|tool_response>", "<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>",
    "<|call|>", "<|calls|>", "<|flush|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]",
    "[EOS]",
))
# fmt: on


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
    """Writes graphs and data files into `folder`. `progress` is called with the number of bytes written since its last call.

    Raises ExportError, CheckpointError.
    """
    first, static = target.checkpoint, request.device is not None
    paths = {
        role: folder / _file_name(role, request, "onnx") for role in [*(STATIC_ROWS if static else ("target", "target_head")), "drafter"]
    }
    data = {role: folder / _file_name(role, request, "onnx_data") for role in ("target", "drafter")}
    store = PlainWeightFile if static else WeightFile
    with store(data["target"], progress, importance.get("target")) as weights:
        formats = TargetFormats(
            layers=layers_format(request),
            embedding=table_format(request),
            kv=store_kv(request.kv, first, weights),
            soft_rows=request.media is not None,
        )
        stored = store_target(first, weights, formats, tables=not static)
    with store(data["drafter"], progress, importance.get("drafter")) as weights:
        sparse = drafter.checkpoint.assistant.ordered_embeddings
        drafting = store_drafter(drafter.checkpoint, weights, weight_format(request.drafter, request), head_format(request, sparse=sparse))
    layout = replace(layout, buffers=_buffers(first.architecture, layout, request))
    contrib_ops = set() if static else _write_dynamic(stored, drafting, formats, layout, paths)
    encoders, encoder_ops = write_encoders(first, request.media, folder, progress) if request.media is not None else ((), set())
    files = OnnxFiles(
        parts=(
            *encoders,
            *(_part(role, path, "onnx", request) for role, path in paths.items()),
            *(_part(f"{role}_data", path, "onnx_data", request) for role, path in data.items()),
            *(write_tables(first, request, folder, progress) if static else ()),
        ),
        layout=layout,
        graphs=onnx_facts(target, contrib_ops | encoder_ops, PlainGraph.opset if static else OPSET),
        static=static_facts(first.architecture, request),
    )
    if request.device == "qnn" and request.importance_roles:
        write_calibrated(stored, drafting, target, files)
    elif static:
        write_static(stored, drafting, layout, paths)
    elif request.kv == "int8":
        rows = measure_rows(target, files)
        fit_scales(formats.kv, data["target"], layout.buffers, files.graphs.rotations, rows)
    return files


def _write_dynamic(
    target: TargetWeights, drafter: DrafterWeights, formats: TargetFormats, layout: CacheLayout, paths: Mapping[str, Path]
) -> set[str]:
    """Writes the graphs of dynamic shapes and returns the names of the contrib operators that they use."""
    assert target.table is not None
    contrib_ops = write_target(target, paths["target"], paths["target_head"], formats)
    return contrib_ops | write_drafter(target.model, layout.drafter_sources, drafter, target.table, formats.kv, paths["drafter"])


def _file_name(role: str, request: OnnxRequest, ending: str) -> str:
    return f"{role.replace('_', '-')}-{quantization_name(role, request)}.{ending}"


def _part(role: str, path: Path, kind: str, request: OnnxRequest) -> BundlePart:
    return BundlePart(role=role, path=path, format=kind, quantization=quantization_name(role, request))


def compare(
    reference: Reference, files: OnnxFiles, request: OnnxRequest, inputs: MediaInputs | None, folder: Path, *, calibrated: bool
) -> dict[str, Any]:
    """Compares written graphs with the reference.

    If their weights are not float32, it also writes float32 graphs, compares them and removes them again. If the graphs are `calibrated`,
    it does the same with graphs that are not. `inputs` are those of the encoders. Returns the figures for the manifest, or
    {"skipped": reason}. Raises ParityError.
    """
    target = reference.target
    exact = (request.target, request.drafter, request.embedding, request.kv) == ("f32", "f32", None, "f32")
    reason = why_not(reference, "onnxruntime", "onnx")
    rounded = target.checkpoint.rounding_method
    if rounded == "compressed-tensors":
        reason = "the reference does not round activations of compressed-tensors checkpoints here"
    if reason is None and not exact:
        free, needed = shutil.disk_usage(folder).free, 4 * reference.parameters
        reason = f"the float32 graphs need {byte_text(needed)} of disk, {byte_text(free)} are free" if needed > free else None
    if reason is not None:
        return {"skipped": reason}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        plain = files

        def other(request: OnnxRequest) -> OnnxFiles:
            made = write_onnx(
                target, reference.drafter, request, layout=files.layout, importance={}, folder=Path(scratch), progress=lambda _: None
            )
            return replace(files, parts=made.parts, layout=made.layout)

        if not exact:
            plain = other(OnnxRequest(target="f32", drafter="f32", device="static" if request.device else None))
        uncalibrated = other(request) if calibrated else None
        better = _better(reference, request)
        figures = measure_onnx_parity(
            reference, plain, files, request, rounded=rounded is not None, better=better, uncalibrated=uncalibrated
        )
    if request.media is None or inputs is None:
        return figures
    return figures | {"media": encoder_parity(reference, files.paths, request.media, inputs, reference.architecture.hidden_size)}


def _better(reference: Reference, request: OnnxRequest) -> str | None:
    """Returns the option for the next better weight type, with the approximate size of its graphs; None if there is no better type."""
    types = list(reversed(WEIGHT_TYPES))
    place = types.index(request.target) + 1
    if place == len(types):
        return None
    changed = replace(request, target=types[place])
    size = expected_onnx_bytes(reference.target.checkpoint, reference.drafter.checkpoint, changed)
    return f"--onnx-target {types[place]}, {byte_text(size)}"


def onnx_facts(target: ResolvedSource, contrib_ops: set[str], opset: int) -> OnnxGraphs:
    """Returns the manifest's facts about a pair's graphs."""
    assert target.tokenizer is not None  # resolve_pair rejects a checkpoint without one
    model, vocabulary = target.checkpoint.architecture, target.tokenizer
    ends = {token for token, piece in enumerate(vocabulary.pieces) if piece in _END_PIECES}
    if "eos" in vocabulary.special_ids:
        ends.add(vocabulary.special_ids["eos"])
    return OnnxGraphs(
        opset=opset,
        contrib_ops=tuple(sorted(contrib_ops)),
        rotations=_rotations(model),
        context=model.context,
        bos_token=vocabulary.special_ids.get("bos"),
        eos_token=vocabulary.special_ids.get("eos"),
        eog_tokens=tuple(sorted(ends)),
        control_tokens=tuple(sorted(ends | {token for token, kind in enumerate(vocabulary.types) if kind == CONTROL})),
    )


def _rotations(model: TextArchitecture) -> tuple[Rotation, ...]:
    """The rotations by kind of layer. Full layers rotate only the first pairs (transformers, modeling_rope_utils.py, proportional)."""
    full = model.full_head_dim
    rotated = int(model.full_rotary_share * full // 2)
    rotations = [Rotation(kind="full", base=model.full_rope_base, head_dim=full, rotated_pairs=rotated)]
    if SLIDING in model.layer_types:
        rotations.append(Rotation(kind="sliding", base=model.sliding_rope_base, head_dim=model.head_dim, rotated_pairs=model.head_dim // 2))
    return tuple(rotations)


def _buffers(model: TextArchitecture, layout: CacheLayout, request: OnnxRequest) -> tuple[CacheBuffer, ...]:
    """Returns the K/V buffers of the owning layers.

    In graphs of fixed shapes, a sliding buffer is a ring. It holds the drafter's window, the rows that may be rolled back, and one verify.
    """
    kept, verify, static = model.window + 1 + layout.rewind_slack, MAX_DRAFT_LENGTH + 1, request.device is not None
    rows = {SLIDING: kept + (verify if static else SPARE_ROWS), FULL: layout.full.capacity + (0 if static else verify)}
    return tuple(
        CacheBuffer(
            layer=layer,
            kind="sliding" if model.is_sliding(layer) else "full",
            key=f"key.{layer}",
            value=f"value.{layer}",
            kv_heads=model.kv_heads_of(layer),
            head_dim=model.head_dim_of(layer),
            dtype=KV_TYPES[request.kv],
            rows=rows[model.layer_types[layer]],
            read="rows" if not static and reads_rows(model, layer) else "buffer",
            drafter_read="rows" if not static and reads_rows(model, layer, drafter=True) else "buffer",
        )
        for layer in range(model.owning_layers)
    )
