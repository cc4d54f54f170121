"""What may be asked of an ONNX export. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from edge_export.checkpoint.architecture import TextArchitecture
from edge_export.checkpoint.sources import ResolvedSource
from edge_export.errors import ExportError
from edge_export.output.bundle_part import BundlePart
from edge_runtime.bundle.manifest import CacheLayout, OnnxGraphs, StaticGraphs

OnnxWeights = Literal["f32", "f16", "int8", "int4"]
ONNX_WEIGHTS: tuple[OnnxWeights, ...] = get_args(OnnxWeights)
# How K/V rows are kept.
KvKind = Literal["f32", "f16", "int8"]
KV_KINDS: tuple[KvKind, ...] = get_args(KvKind)
Block = Literal[32, 64, 128]
BLOCKS: tuple[Block, ...] = get_args(Block)
# "static" is any runtime that wants fixed shapes; the others are that too, with weights in the form this execution provider takes.
Device = Literal["static", "openvino-npu", "qnn"]
DEVICES: tuple[Device, ...] = get_args(Device)
# What a device's weights are where nothing else is asked for. QNN's compiler fails on whole numbers beside per-layer embeddings.
DEVICE_WEIGHTS: dict[str, dict[str, Any]] = {"openvino-npu": {"block": 128}, "qnn": {"target": "f16", "drafter": "f16"}}
# Blocks where none are asked for: what costs least time; what shapes that stay fixed were tried with.
_BLOCK, _STATIC_BLOCK = 128, 32
# Bytes per weight, with a float32 scale for each block of 32.
_BYTES: dict[OnnxWeights, float] = {"f32": 4.0, "f16": 2.0, "int8": 1.125, "int4": 0.625}


@dataclass(frozen=True, kw_only=True)
class OnnxRequest:
    """How the two models' weights are stored; `block` is that of int8 and int4. `embedding` None: as the target's other weights.

    `block` None: 128; in graphs of open shapes int4 is then *mixed*, with smaller blocks or 8 bits for the few weights whose rounding
    costs most (`onnx_forms`).

    Arithmetic is in float32 with f32 and f16 weights; int8 and int4 multiply with activations rounded to int8.
    `kv` is how K/V rows are kept. With a `device` the graphs have fixed shapes and plain operators (docs/npu.md).
    """

    target: OnnxWeights = "int4"
    drafter: OnnxWeights = "int8"
    block: Block | None = None
    embedding: OnnxWeights | None = None
    device: Device | None = None
    kv: KvKind = "f32"

    @property
    def block_size(self) -> int:
        """How many weights share a scale, for all that is not mixed."""
        return self.block or (_BLOCK if self.device is None else _STATIC_BLOCK)

    def mixed(self, weights: OnnxWeights) -> bool:
        """Whether such weights are mixed."""
        return weights == "int4" and self.block is None and self.device is None

    @property
    def importance_roles(self) -> set[str]:
        """The roles whose quantization takes account of importance."""
        return {role for role, weights in (("target", self.target), ("drafter", self.drafter)) if weights in ("int8", "int4")}


def expected_onnx_bytes(weight_count: int, weights: OnnxWeights) -> int:
    """Returns about how many bytes so many weights take."""
    return int(weight_count * _BYTES[weights])


def table_bytes(model: TextArchitecture, weights: OnnxWeights) -> int:
    """Returns how many bytes the embeddings take that a host looks up: float32 for f32 weights, otherwise float16."""
    per_layer = model.per_layer_vocab_size * model.layers * model.per_layer_size
    return (model.vocab_size * model.hidden_size + per_layer) * (4 if weights == "f32" else 2)


def check_onnx_sources(target: ResolvedSource, drafter: ResolvedSource) -> None:
    """Raises ExportError if there is no ONNX form of this pair."""
    for source in (target, drafter):
        if source.gguf is not None:
            raise ExportError(f"{source.origin} is a GGUF; ONNX graphs are made from a checkpoint folder or hub id, give that")


@dataclass(frozen=True, kw_only=True)
class OnnxFiles:
    """The written graphs and data, the cache layout with their buffers, and the manifest's facts of them."""

    parts: tuple[BundlePart, ...]
    layout: CacheLayout
    graphs: OnnxGraphs
    static: StaticGraphs | None = None

    @property
    def paths(self) -> dict[str, Path]:
        """Paths of the files by their roles."""
        return {part.role: part.path for part in self.parts}
