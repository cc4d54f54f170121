"""The weight format of each of a pair's matrices, for graphs of dynamic shapes.

int4 is mixed unless a block is asked for: most weights are in blocks of 128, the fastest to multiply with. The few weights that lose most
by it are stored more exactly. Figures: docs/onnx.md, from scripts/benchmarks/bench_quantizers.py.
"""

from __future__ import annotations

from dataclasses import replace

from edge_export.onnx.block_quantization import WeightSpec
from edge_export.onnx.request import OnnxRequest, OnnxWeights
from edge_export.onnx.weights import WeightFormat

# The token embedding, which is also the head, loses more than any other matrix.
_MIXED_TABLE_BLOCK = 64


def weight_format(weights: OnnxWeights, request: OnnxRequest) -> WeightFormat:
    """The format of a model's layers with these weights."""
    if weights == "f32" or weights == "f16":
        return WeightFormat(kind=weights)
    block = request.block_size
    format = WeightFormat(kind="blocks", spec=WeightSpec(bits=8 if weights == "int8" else 4, block=block))
    if not request.mixed(weights):
        return format
    return WeightFormat(kind="blocks", spec=format.spec, sensitive=WeightFormat(kind="blocks", spec=WeightSpec(bits=8, block=block)))


def layers_format(request: OnnxRequest) -> WeightFormat:
    """The format of the target's layers."""
    return _target_format(request.target, request)


def table_format(request: OnnxRequest) -> WeightFormat:
    """The format of the target's token embedding."""
    weights = request.embedding or request.target
    if request.mixed(weights):
        return WeightFormat(kind="blocks", spec=WeightSpec(bits=4, block=_MIXED_TABLE_BLOCK))
    return _target_format(weights, request)


def _target_format(weights: OnnxWeights, request: OnnxRequest) -> WeightFormat:
    format = weight_format(weights, request)
    return replace(format, off_grid=weight_format("int8", request)) if request.on_grid and weights == "int4" else format


def head_format(request: OnnxRequest) -> WeightFormat:
    """The format of the drafter's output rows, at least 8 bits: they are few, and a wrong row is a wrong draft."""
    return weight_format("int8" if request.drafter == "int4" else request.drafter, request)


def quantization_name(role: str, request: OnnxRequest) -> str:
    """Returns the manifest's name for the weights of the file with this role."""
    weights = request.drafter if role.startswith("drafter") else request.target
    if request.mixed(weights):
        return f"{weights}-mixed"
    return f"{weights}-b{request.block_size}" if weights in ("int8", "int4") else weights
