"""Small ONNX graphs of the kernels' operators, and sessions of onnxruntime that have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edge_runtime.backends.kernels import loader
from edge_runtime.bundle.onnx_graph import KERNELS

Shape = Sequence[int | str]
FLOAT = TensorProto.FLOAT


def kernel_node(operator: str, inputs: Sequence[str], outputs: Sequence[str], **facts: float) -> Any:
    return helper.make_node(operator, inputs, outputs, domain=KERNELS, **facts)


def graph_of(
    nodes: Sequence[Any],
    inputs: Mapping[str, tuple[int, Shape]],
    outputs: Sequence[str],
    constants: Mapping[str, NDArray[Any]] | None = None,
) -> bytes:
    """A model of these nodes; inputs have a type of TensorProto and a shape, outputs are float32."""
    given = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    made = [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs]
    kept = [onnx.numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    opsets = [helper.make_opsetid(*each) for each in (("", 23), ("com.microsoft", 1), (KERNELS, 1))]
    graph = helper.make_graph(nodes, "g", given, made, kept)
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString())


def session_of(model: bytes | Path, *, threads: int = 2) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.register_custom_ops_library(str(loader.kernels_path()))
    return onnxruntime.InferenceSession(model if isinstance(model, bytes) else str(model), options)
