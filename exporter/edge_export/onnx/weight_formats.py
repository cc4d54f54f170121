"""The weight format of each of a pair's matrices, and its name in the manifest.

int4 is mixed unless a block is asked for: most weights are in blocks of 128, the fastest to multiply with. The few weights that lose most
by it are stored more exactly. Figures: docs/onnx.md, from scripts/benchmarks/bench_quantizers.py.
"""

from __future__ import annotations

from dataclasses import replace

from edge_export.onnx.block_quantization import WeightSpec
from edge_export.onnx.request import WEIGHT_TYPES, OnnxRequest, OnnxWeights
from edge_export.onnx.weights import WeightFormat

# The token embedding, which is also the head, loses more than any other matrix.
_MIXED_TABLE_BLOCK = 64
# QNN multiplies with integers of one scale for each channel.
_CHANNELS = "qnn"


def weight_format(weights: OnnxWeights, request: OnnxRequest) -> WeightFormat:
    """The format of a model's layers with these weights."""
    form = WEIGHT_TYPES[weights]
    if form.kind != "blocks" or request.device == _CHANNELS:
        return WeightFormat(kind=form.kind)
    format = WeightFormat(kind="blocks", spec=WeightSpec(bits=form.bits, block=request.block_size))
    if not request.mixed(weights):
        return format
    return replace(format, sensitive=WeightFormat(kind="blocks", spec=WeightSpec(bits=8, block=request.block_size)))


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


def head_format(request: OnnxRequest, *, sparse: bool) -> WeightFormat:
    """The format of the drafter's output rows, at least 8 bits: they are few, and a wrong row is a wrong draft.

    Those of a sparse head, which are gathered, are floats in graphs of fixed shapes.
    """
    format = weight_format("int8" if request.drafter == "int4" else request.drafter, request)
    return WeightFormat(kind="f16") if sparse and request.device is not None and format.kind == "blocks" else format


def quantization_name(role: str, request: OnnxRequest) -> str:
    """Returns the manifest's name for the weights of the file with this role."""
    weights = request.drafter if role.startswith("drafter") else request.target
    if WEIGHT_TYPES[weights].kind != "blocks":
        return weights
    if request.device == _CHANNELS:
        return f"{weights}-channel"
    return f"{weights}-mixed" if request.mixed(weights) else f"{weights}-b{request.block_size}"
