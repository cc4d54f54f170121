"""The options of an ONNX export, and the record of its files. This module imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from edge_devices.option_fields import option
from edge_export.checkpoint.architecture import TextArchitecture
from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.media_architecture import AudioTower, MediaArchitecture, VisionTower
from edge_export.checkpoint.sources import ResolvedSource
from edge_export.checkpoint.tokenizer_vocabulary import TOKENIZER_NAME
from edge_export.errors import ExportError
from edge_export.output import BundlePart
from edge_runtime.bundle.manifest import CacheLayout, OnnxGraphs, StaticGraphs
from edge_runtime.bundle.tokenizer_json import check_file
from edge_runtime.errors import BundleError

OnnxWeights = Literal["f32", "f16", "int8", "int4"]
# Types of K/V rows.
KvKind = Literal["f32", "f16", "int8"]
# Types of the encoders' weights.
MediaWeights = Literal["f32", "f16", "int8"]
ONNX_MEDIA: dict[str, MediaWeights] = {"f32": "f32", "f16": "f16", "bf16": "f16", "q8_0": "int8"}
Block = Literal[32, 64, 128]
# "static" means fixed shapes for any runtime. The others also have the weight format that this execution provider needs.
Device = Literal["static", "openvino-npu", "qnn"]
# Default options for a device. QNN's compiler fails on integer weights in a model with per-layer embeddings.
DEVICE_WEIGHTS: dict[str, dict[str, Any]] = {"openvino-npu": {"block": 128}, "qnn": {"target": "f16", "drafter": "f16"}}
# A head size must be a multiple of this if GroupQueryAttention rotates the heads (onnxruntime, group_query_attention_helper.h).
_HEAD_STEP = 16
# Default block sizes: the fastest for dynamic shapes, and the one that was tested with fixed shapes.
_BLOCK, _STATIC_BLOCK = 128, 32
# The block size of an int8 target (docs/design/quantization.md). Real matrices lose 0.023 nats with it, and 0.040 in blocks of 128. A row
# takes 1.06 times as long.
_INT8_BLOCK: Block = 32
# Matrices that have 8 bits in mixed int4, by their GGUF names: kinds of a layer's matrices, and the embedding.
_IN_8_BITS, _TABLE = frozenset({"attn_k", "attn_v", "ffn_down", "proj"}), "token_embd"


@dataclass(frozen=True)
class WeightType:
    """A weight type: floats, or integers of `bits` bits in blocks. `mean_kl` is the limit of the graphs' mean KL divergence, in nats."""

    kind: Literal["f32", "f16", "blocks"]
    bits: int
    mean_kl: float

    @property
    def bytes(self) -> float:
        """Bytes per weight, with a float32 scale for each block of 32."""
        return (self.bits + (1 if self.kind == "blocks" else 0)) / 8


WEIGHT_TYPES: dict[OnnxWeights, WeightType] = {
    "f32": WeightType("f32", 32, 1e-4),
    "f16": WeightType("f16", 16, 0.02),
    "int8": WeightType("blocks", 8, 0.2),
    "int4": WeightType("blocks", 4, 1.0),
}
# The limit for mixed int4. Limits are above the loss of real matrices of 270 million weights, which lose more than larger models: 0.53 for
# mixed int4 without a calibration, and 0.92 for the layers alone in blocks of 128 with one. No limit is above 1.0, where a model's
# perplexity has doubled or tripled. So all matrices in blocks of 128 without a calibration (3.24) are refused. Figures: docs/results.md and
# docs/design/quantization.md.
_MIXED_KL = 0.6


@dataclass(frozen=True, kw_only=True)
class OnnxRequest:
    """How the two models' weights are stored.

    `embedding` None: the same weight type as the target's other weights. `block` applies to int8 and int4. With a `device`, its default is
    32. In graphs of dynamic shapes its default is 128, with two exceptions: an int8 target has 32, and int4 is *mixed*. Mixed int4 has
    blocks of 64, and 8 bits for the embedding, which is the head too, and for the weights whose rounding costs most (see weights.py).

    With f32 and f16 weights, arithmetic is in float32. With int8 and int4, activations are rounded to int8 before they are multiplied.
    `on_grid`: the target was trained for int4 in blocks of 32, and `block` is 32; matrices that lie on no grid get 8 bits.
    `media` is the weight type of the encoders of images and sound; None leaves the encoders out. `kv` is the type of K/V rows. With a
    `device`, the graphs have fixed shapes and plain operators (docs/design/onnx-graphs.md).
    """

    target: OnnxWeights = option("--onnx-target", default="int4", help="Weight type of the target's ONNX graphs.")
    drafter: OnnxWeights = option("--onnx-drafter", default="int8", help="Weight type of the drafter's ONNX graph.")
    embedding: OnnxWeights | None = option(
        "--onnx-embedding",
        help="Weight type of the target's embedding and output head in ONNX.  [default: that of --onnx-target, int8 where int4 is mixed]",
    )
    kv: KvKind = option("--onnx-kv", default="f32", help="Type of the K/V cache of ONNX graphs; f32 is the fastest.")
    block: Block | None = option(
        "--onnx-block",
        help="Number of int8 or int4 weights that share a scale.  [default: 32 for an int8 target and with --device, else 128; for int4,"
        " smaller blocks or 8 bits for the weights that lose most by rounding]",
    )
    device: Device | None = option(
        help="Write ONNX graphs of fixed shapes for this NPU, or 'static' for any runtime that needs fixed shapes."
    )
    media: MediaWeights | None = None
    on_grid: bool = False

    @property
    def block_size(self) -> int:
        """How many weights share a scale, unless weights are mixed."""
        return self.block or (_BLOCK if self.device is None else _STATIC_BLOCK)

    @property
    def default_blocks(self) -> bool:
        """Whether the graphs have dynamic shapes and the default block sizes."""
        return self.block is None and self.device is None

    @property
    def of_target(self) -> OnnxRequest:
        """This request with the target's block size. That of int8 is small, because inputs are rounded block by block too."""
        return replace(self, block=_INT8_BLOCK) if self.target == "int8" and self.default_blocks else self

    def mixed(self, weights: OnnxWeights) -> bool:
        """Whether this weight type is mixed from 4 and 8 bits."""
        return weights == "int4" and self.default_blocks

    @property
    def kl_limit(self) -> float:
        """The limit of the target graphs' mean KL divergence from the reference, in nats."""
        weights = _MIXED_KL if self.mixed(self.target) else WEIGHT_TYPES[self.target].mean_kl
        return max(weights, WEIGHT_TYPES[self.kv].mean_kl)

    @property
    def table(self) -> OnnxWeights:
        """The weight type of the target's embedding and head."""
        return self.embedding or ("int8" if self.mixed(self.target) else self.target)

    @property
    def importance_roles(self) -> dict[str, frozenset[str] | None]:
        """How the quantization of each role whose weights are in blocks uses importance.

        The value is None if errors are only weighed and not compensated. Otherwise it is the kinds of matrices, by GGUF names, whose errors
        are not compensated because they have 8 bits; only 4-bit matrices gain by compensation. A drafter's table, which is its head, always
        has 8 bits.
        """
        without = (_IN_8_BITS if self.default_blocks else frozenset()) | (frozenset() if self.table == "int4" else {_TABLE})
        roles = (("target", self.target, without), ("drafter", self.drafter, without | {_TABLE}))
        return {role: plain if weights == "int4" else None for role, weights, plain in roles if WEIGHT_TYPES[weights].kind == "blocks"}


def expected_onnx_bytes(target: Checkpoint, drafter: Checkpoint, request: OnnxRequest) -> int:
    """Returns the approximate size of the graphs' data, with the tables that a host looks up, in float32 for f32 and else in float16."""
    pair = ((target, request.target), (drafter, request.drafter))
    weights = sum(int(half.parameters * WEIGHT_TYPES[kind].bytes) for half, kind in pair)
    tables = target.architecture.vocab_size * target.architecture.hidden_size * (1 if target.architecture.tied else 2)
    weights += int(tables * (WEIGHT_TYPES[request.table].bytes - WEIGHT_TYPES[request.target].bytes))
    looked_up = 0 if request.device is None else target.architecture.table_weights
    return weights + looked_up * (4 if request.table == "f32" else 2)


def reads_rows(target: TextArchitecture, layer: int, *, drafter: bool = False) -> bool:
    """Whether attention to this target layer is on rows. This needs a single K/V head, as only then are the rows contiguous."""
    return (drafter or not target.is_sliding(layer)) and target.kv_heads_of(layer) == 1


def _check_heads(target: ResolvedSource) -> None:
    """Raises ExportError if GroupQueryAttention, which layers use that do not read rows, cannot rotate heads of this size.

    A drafter has the head sizes of the target layers that it reads, so it needs no check.
    """
    model = target.checkpoint.architecture
    for layer, kind in enumerate(model.layer_types[: model.owning_layers]):
        size = model.head_dim_of(layer)
        if size % _HEAD_STEP and not reads_rows(model, layer):
            raise ExportError(
                f"{target.origin} has {kind} heads of {size} values, and onnxruntime's GroupQueryAttention takes multiples of {_HEAD_STEP};"
                " export it with --format gguf"
            )


def _check_static(target: ResolvedSource, request: OnnxRequest) -> None:
    """Raises ExportError if this target or these weight types cannot be exported with fixed shapes."""
    model = target.checkpoint.architecture
    if model.experts:
        raise ExportError(f"{target.origin} is a mixture of experts, which graphs of fixed shapes cannot route; leave --device out")
    if request.device == "qnn" and "int4" in (request.target, request.drafter, request.embedding):
        raise ExportError("QNN computes wrong products with int4 weights of one scale per channel; take f16 or int8 for --device qnn")
    if request.device == "qnn" and model.per_layer_size and "int8" in (request.target, request.embedding):
        raise ExportError(
            f"QNN's compiler fails on integer weights beside per-layer embeddings, which {target.origin} has; take f16 for --onnx-target"
        )


def check_onnx_sources(target: ResolvedSource, drafter: ResolvedSource, request: OnnxRequest) -> None:
    """Raises ExportError if the pair cannot be exported to ONNX."""
    for source in (target, drafter):
        if source.gguf is not None:
            raise ExportError(f"{source.origin} is a GGUF; ONNX graphs are made from a checkpoint, give its folder or hub id")
    if request.device is None:
        _check_heads(target)
    else:
        _check_static(target, request)
    assert target.tokenizer is not None  # only a GGUF source has no tokenizer here
    try:
        check_file(target.tokenizer.folder / TOKENIZER_NAME)
    except BundleError as error:
        raise ExportError(f"{error}, or export GGUF files, whose tokenizer is llama.cpp's") from error


def check_towers(media: MediaArchitecture) -> tuple[VisionTower, AudioTower | None]:
    """Returns the towers of E2B or E4B. Raises ExportError for those of a larger member.

    Larger members need attention to later rows, and onnxruntime's GroupQueryAttention attends only to earlier ones.
    """
    vision, audio = media.vision, media.audio
    if media.bidirectional or not isinstance(vision, VisionTower) or vision.standardized or not isinstance(audio, AudioTower | None):
        raise ExportError(
            "ONNX graphs take images and sound of E2B and E4B only, and this is a larger member; export --format gguf, or leave --media out"
        )
    return vision, audio


@dataclass(frozen=True, kw_only=True)
class OnnxFiles:
    """The written graphs and data files, the cache layout with the graphs' buffers, and the manifest's facts about the graphs."""

    parts: tuple[BundlePart, ...]
    layout: CacheLayout
    graphs: OnnxGraphs
    static: StaticGraphs | None = None

    @property
    def paths(self) -> dict[str, Path]:
        """Paths of the files by their roles."""
        return {part.role: part.path for part in self.parts}
