"""Builds ONNX graphs node by node. Only this module imports onnx.

Each operation that the runtime's kernels compute is one node in the kernels' domain. The same file defines it as an ONNX function of
stock operators, and onnxruntime expands the node to that function where the kernels are not loaded. So a graph runs everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edge_devices.errors import first_line
from edge_export.errors import ExportError
from edge_export.onnx.weights import Matrix, Stored
from edge_runtime.bundle.onnx_graph import CONTRIB, KERNELS

# The first opset with RMSNormalization is 23 (onnx 1.18, IR 11).
OPSET, IR_VERSION = 23, 11
_TYPES = {
    "f32": TensorProto.FLOAT,
    "f16": TensorProto.FLOAT16,
    "u8": TensorProto.UINT8,
    "i32": TensorProto.INT32,
    "i64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
    "i4": TensorProto.INT4,
    "i8": TensorProto.INT8,
}
Shape = Sequence[int | str]
# MatMulNBits' accuracy_level that rounds activations to int8.
_INT8_ACTIVATIONS = 4
# The accuracy_level for a checkpoint that rounds activations itself: they are multiplied as float32, without a second rounding. The
# kernels compute the product with both of the checkpoint's roundings in one operator.
_FLOAT_ACTIVATIONS = 1
_LOWEST, _HIGHEST = -128.0, 127.0


class Body(NamedTuple):
    """The graph that takes the stock nodes of a kernel's operator, and the names of the operator's inputs and outputs in that graph."""

    graph: GraphBuilder
    inputs: Sequence[str]
    outputs: Sequence[str]


class GraphBuilder:
    """A graph being built. A value is represented by its name.

    A subgraph can use values of its outer graph. The outermost graph holds all weights. With `kernels`, the graph uses the operators of the
    runtime's kernels: products with block-quantized weights, and the operations between these products.
    """

    opset, ir_version = OPSET, IR_VERSION

    def __init__(self, name: str, parent: GraphBuilder | None = None, *, kernels: bool = False) -> None:
        self.name = name
        self._kernels: bool = parent._kernels if parent else kernels
        self._functions: dict[bytes, Any] = {}
        self.contrib_ops: set[str] = parent.contrib_ops if parent else set()
        self._root: GraphBuilder = parent._root if parent else self
        self._nodes: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._initializers: dict[str, Any] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._count = 0

    def subgraph(self, name: str) -> GraphBuilder:
        """Returns a new graph for the body of a Loop or a branch of an If."""
        return GraphBuilder(name, self)

    def input(self, name: str, kind: str, shape: Shape) -> str:
        """Declares an input. A string in `shape` names a dimension whose size is known only at run time."""
        self._inputs.append(helper.make_tensor_value_info(name, _TYPES[kind], list(shape)))
        return name

    def output(self, value: str, kind: str, shape: Shape) -> str:
        """Declares a value as an output."""
        self._outputs.append(helper.make_tensor_value_info(value, _TYPES[kind], list(shape)))
        return value

    def ops(self, kind: str, inputs: Sequence[str], outputs: int | Sequence[str], *, domain: str = "", **attributes: Any) -> list[str]:
        """Appends a node with several outputs and returns their names; `outputs` is their number or the names themselves."""
        names = [self.fresh(kind) for _ in range(outputs)] if isinstance(outputs, int) else list(outputs)
        if domain == CONTRIB:
            self.contrib_ops.add(kind)
        bodies = {key: value._proto() if isinstance(value, GraphBuilder) else value for key, value in attributes.items()}
        self._nodes.append(helper.make_node(kind, list(inputs), names, name=self.fresh(f"node_{kind}"), domain=domain, **bodies))
        return names

    def op(self, kind: str, *inputs: str, domain: str = "", name: str | None = None, **attributes: Any) -> str:
        """Appends a node with one output and returns that output's name."""
        return self.ops(kind, inputs, [name] if name else 1, domain=domain, **attributes)[0]

    @contextmanager
    def kernel(self, kind: str | None, inputs: Sequence[str], outputs: Sequence[str], **attributes: float) -> Iterator[Body]:
        """Appends an operator of the kernels, and defines it in the file as a function of the stock nodes that the caller adds to the body.

        These nodes may read and write only the yielded names. Weights that they use become further inputs of the operator, in order of use.
        Without kernels, or if `kind` is None, the nodes go directly into this graph.
        """
        if kind is None or not self._kernels:
            yield Body(self, inputs, outputs)
            return
        function = _Function(self._root)
        body = Body(function, [f"x{place}" for place in range(len(inputs))], [f"y{place}" for place in range(len(outputs))])
        yield body
        weights = [self.weight(stored) for stored in function.weights]
        node = helper.make_node(kind, [*inputs, *weights], outputs, name=self.fresh(f"node_{kind}"), domain=KERNELS, **attributes)
        node.overload = self._root._overload(function.proto(kind, body, sorted(attributes)))
        self._nodes.append(node)

    def _overload(self, function: Any) -> str:
        """Returns the `overload` that distinguishes this function from others of the same name; equal functions share one."""
        known = self._functions.setdefault(function.SerializeToString(deterministic=True), function)
        if not known.overload:
            known.overload = str(sum(other.name == known.name for other in self._functions.values()))
        return str(known.overload)

    def integers(self, values: Sequence[int] | NDArray[np.integer]) -> str:
        """A small int64 constant, stored in the graph itself, which is required for shapes."""
        return self._constant(np.asarray(values, np.int64))

    def floats(self, values: float | Sequence[float] | NDArray[np.float32]) -> str:
        """A small float32 constant."""
        return self._constant(np.asarray(values, np.float32))

    def bytes(self, values: int | Sequence[int]) -> str:
        """A small uint8 constant."""
        return self._constant(np.asarray(values, np.uint8))

    def no_rows(self, *shape: int) -> str:
        """A float32 array [0, *shape]."""
        return self._constant(np.empty((0, *shape), np.float32))

    def weight(self, stored: Stored) -> str:
        """Declares a weight in an external data file and returns its name. A weight with the same bytes and shape is declared once."""
        name = f"{Path(stored.location).stem}@{stored.offset}x{'x'.join(map(str, stored.shape))}"
        if name not in self._root._initializers:
            tensor = TensorProto(name=name, data_type=_TYPES[stored.type], dims=stored.shape, data_location=TensorProto.EXTERNAL)
            for key, value in (("location", stored.location), ("offset", stored.offset), ("length", stored.length)):
                tensor.external_data.add(key=key, value=str(value))
            self._root._initializers[name] = tensor
        return name

    def linear(self, value: str, matrix: Matrix, *, name: str | None = None) -> str:
        """Returns the product [..., rows] of value [..., columns] and the transposed matrix."""
        before, after = matrix.rounding or (0.0, 0.0)
        result, scales = name or self.fresh("product"), {"input_scale": float(before), "output_scale": float(after)}
        trained = "MatMulStatic" if before and matrix.sizes else None
        with self.kernel(trained, [value], [result], **matrix.sizes, **scales) as (body, (rows,), (rounded,)):
            product = body._product(body._as_int8(rows, before), matrix, name=None if after else rounded)
            if after:
                body._as_int8(product, after, name=rounded)
        return result

    def _as_int8(self, value: str, scale: float, *, name: str | None = None) -> str:
        """Rounds to the nearest of the multiples -128 to 127 of `scale`; 0 rounds nothing. As transformers' apply_srq in gemma_quant.py."""
        if not scale:
            return value
        step = self.floats(scale)
        level = self.op("Clip", self.op("Round", self.op("Div", value, step)), self.floats(_LOWEST), self.floats(_HIGHEST))
        return self.op("Mul", level, step, name=name)

    def _product(self, value: str, matrix: Matrix, *, name: str | None = None) -> str:
        """The product alone, without the roundings that the checkpoint specifies."""
        kind = "MatMulHalves" if matrix.format.kind == "f16" else "MatMulRows" if matrix.sizes and matrix.rounding is None else None
        result = name or self.fresh("product")
        with self.kernel(kind, [value], [result], **matrix.sizes) as (body, (rows,), (product,)):
            if not matrix.sizes:
                body.op("FusedMatMul", rows, body._float(matrix), domain=CONTRIB, name=product, transB=1)
            else:
                level = _INT8_ACTIVATIONS if matrix.rounding is None else _FLOAT_ACTIVATIONS
                weights = body.weight(matrix.values), body._scales(matrix)
                body.op("MatMulNBits", rows, *weights, domain=CONTRIB, name=product, accuracy_level=level, **matrix.sizes)
        return result

    def gather(self, matrix: Matrix, indices: str) -> str:
        """Returns the selected rows of the matrix as float32 [*indices, columns]. Other rows are not read."""
        spec = matrix.format.spec
        if spec is None:
            rows = self.op("Gather", self.weight(matrix.values), indices, axis=0)
            return self.op("Cast", rows, to=TensorProto.FLOAT) if matrix.format.kind == "f16" else rows
        data = self.weight(matrix.values.shaped(matrix.rows, matrix.columns * spec.bits // 8))
        return self.op(
            "GatherBlockQuantized",
            data,
            indices,
            self._scales(matrix),
            domain=CONTRIB,
            bits=spec.bits,
            block_size=spec.block,
            gather_axis=0,
            quantize_axis=1,
        )

    def split(self, value: str, sizes: Sequence[int]) -> list[str]:
        """Splits the last axis into parts of constant sizes, because compilers for accelerators require constants here."""
        return self.ops("Split", [value, self.integers(sizes)], len(sizes), axis=-1)

    def fresh(self, stem: str) -> str:
        """Returns a name that the model does not use yet."""
        self._root._count += 1
        return f"{stem}_{self._root._count}"

    def save(self, path: Path) -> None:
        """Writes the model and runs onnx's checker on it. Raises ExportError if the checker rejects it."""
        opsets, functions = self._opsets() + [helper.make_opsetid(KERNELS, 1)] * bool(self._functions), list(self._functions.values())
        facts = {"opset_imports": opsets, "ir_version": self.ir_version, "producer_name": "edge-mtp"}
        model = helper.make_model(self._proto(), functions=functions, **facts)
        path.write_bytes(model.SerializeToString())
        try:
            onnx.checker.check_model(str(path))
        except onnx.checker.ValidationError as error:
            raise ExportError(f"{path.name} is not valid ONNX ({first_line(error)}); report this with the checkpoint's config") from error

    def _opsets(self) -> list[Any]:
        return [helper.make_opsetid("", self.opset)] + [helper.make_opsetid(CONTRIB, 1)] * bool(self.contrib_ops or self.opset == OPSET)

    def _constant(self, array: NDArray[Any]) -> str:
        """Stores equal constants once, in the outermost graph."""
        key = (array.dtype.str, array.shape, array.tobytes())
        root = self._root
        if key not in root._constants:
            name = root._constants[key] = self.fresh("constant")
            root._initializers[name] = numpy_helper.from_array(array, name)
        return root._constants[key]

    def _float(self, matrix: Matrix) -> str:
        weight = self.weight(matrix.values)
        # A constant is cast once, when the model is loaded.
        return self.op("Cast", weight, to=TensorProto.FLOAT) if matrix.format.kind == "f16" else weight

    def _scales(self, matrix: Matrix) -> str:
        assert matrix.scales is not None
        return self.weight(matrix.scales)

    def _proto(self) -> Any:
        return helper.make_graph(self._nodes, self.name, self._inputs, self._outputs, list(self._initializers.values()))


class _Function(GraphBuilder):
    """Collects the stock nodes of a kernel's operator. Constants become nodes, and weights become inputs after the others."""

    def __init__(self, model: GraphBuilder) -> None:
        super().__init__("function")
        self.contrib_ops = model.contrib_ops
        self.weights: list[Stored] = []

    def weight(self, stored: Stored) -> str:
        self.weights.append(stored)
        return f"w{len(self.weights)}"

    def proto(self, kind: str, body: Body, attributes: Sequence[str]) -> Any:
        """Returns the function of an operator with these attributes. Its nodes have the attributes' values built in."""
        inputs = [*body.inputs, *(f"w{place + 1}" for place in range(len(self.weights)))]
        return helper.make_function(KERNELS, kind, inputs, body.outputs, self._nodes, self._opsets(), attributes)

    def _constant(self, array: NDArray[Any]) -> str:
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = self._constants[key] = self.fresh("constant")
            self._nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
        return self._constants[key]


@dataclass(frozen=True, kw_only=True)
class ValueRange:
    """The lowest and the highest value of an activation on the calibration text."""

    low: float
    high: float

    @property
    def scale(self) -> np.float32:
        """The quantization step of 16 bits. The range is extended to include zero, and widened 1.5 times as other text may exceed it."""
        return np.float32(max(1.5 * (max(self.high, 0.0) - min(self.low, 0.0)) / 65535, 1e-9))

    @property
    def zero_point(self) -> np.uint16:
        """The level that represents zero."""
        return np.uint16(min(round(-1.5 * min(self.low, 0.0) / float(self.scale)), 65535))


class PlainGraph(GraphBuilder):
    """A graph that uses only operators of ONNX opset 21.

    `with_ranges` makes a graph for calibration, which outputs the range of each integer matrix's input and output as `range.NAME` [4].
    `ranges` holds these two ranges by matrix; the graph then rounds the inputs and outputs of these matrices to 16 bits.
    """

    opset, ir_version = 21, 10

    def __init__(self, name: str, *, ranges: Mapping[str, tuple[ValueRange, ValueRange]] | None = None, with_ranges: bool = False) -> None:
        super().__init__(name)
        self._ranges = ranges or {}
        self._with_ranges = with_ranges

    def linear(self, value: str, matrix: Matrix, *, name: str | None = None) -> str:
        """Returns the product [..., rows] of value [..., columns] and the matrix, which is stored transposed."""
        stored = self.weight(matrix.values)
        if stored not in self._ranges:
            product = self.op("MatMul", value, self._dense(matrix), name=name)
            if self._with_ranges and matrix.scales is not None:
                self._output_ranges(stored, value, product)
            return product
        before, after = self._ranges[stored]
        return self._rounded(self.op("MatMul", self._rounded(value, before), self._dense(matrix)), after, name=name)

    def _rounded(self, value: str, bounds: ValueRange, *, name: str | None = None) -> str:
        scaling = self.floats(float(bounds.scale)), self._constant(np.asarray(bounds.zero_point))
        return self.op("DequantizeLinear", self.op("QuantizeLinear", value, *scaling), *scaling, name=name)

    def _output_ranges(self, name: str, *values: str) -> None:
        ends = [self.op(kind, value, keepdims=0) for value in values for kind in ("ReduceMin", "ReduceMax")]
        apart = [self.op("Reshape", end, self.integers([1])) for end in ends]
        self.output(self.op("Concat", *apart, axis=0, name=f"range.{name}"), "f32", (4,))

    def _dense(self, matrix: Matrix) -> str:
        weight = self.weight(matrix.values)
        if matrix.scales is None:
            return self.op("Cast", weight, to=1) if matrix.format.kind == "f16" else weight
        if matrix.format.spec is None:
            return self.op("DequantizeLinear", weight, self.weight(matrix.scales), axis=1)
        return self.op("DequantizeLinear", weight, self.weight(matrix.scales), axis=0, block_size=matrix.format.spec.block)
