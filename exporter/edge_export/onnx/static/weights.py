"""Weights of static graphs: matrices are stored transposed, [columns, rows], as plain MatMul needs them.

As integers they have the format of DequantizeLinear of opset 21: signed and symmetric, with a scale for each block of a column, or for
each column. Two 4-bit levels share a byte, the first in the low half (ONNX, onnx.in.proto, INT4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.safetensors import row_pieces
from edge_export.errors import ExportError
from edge_export.onnx.block_quantization import quantize_matrix, round_rows, unpacked_levels
from edge_export.onnx.graph_builder import GraphBuilder
from edge_export.onnx.weights import Matrix, Stored, WeightFile, WeightFormat
from edge_export.quantization.importance import Weighing

_Piece = tuple[NDArray[np.float32], Weighing]


@dataclass(frozen=True, kw_only=True)
class ValueRange:
    """The least and the greatest value of an activation in a calibration text."""

    low: float
    high: float

    @property
    def scale(self) -> np.float32:
        """The step of 16 bits over this range, widened by half for other text; the range includes zero."""
        return np.float32(max(1.5 * (max(self.high, 0.0) - min(self.low, 0.0)) / 65535, 1e-9))

    @property
    def zero_point(self) -> np.uint16:
        """The level that is zero."""
        return np.uint16(min(round(-1.5 * min(self.low, 0.0) / float(self.scale)), 65535))


class PlainGraph(GraphBuilder):
    """A graph of operators of ONNX opset 21 alone.

    With `with_ranges`, a graph for calibration: it outputs the ranges of each matrix's input and output as `range.NAME` [4].
    With `ranges` by matrix, inputs and outputs of integer matrices are rounded to 16 bits.
    """

    opset, ir_version = 21, 10

    def __init__(self, name: str, *, ranges: Mapping[str, tuple[ValueRange, ValueRange]] | None = None, with_ranges: bool = False) -> None:
        super().__init__(name)
        self._ranges = ranges or {}
        self._with_ranges = with_ranges

    def linear(self, value: str, matrix: Matrix) -> str:
        """value [..., columns] times the matrix: [..., rows]."""
        name = self.weight(matrix.values)
        if name not in self._ranges:
            product = self.op("MatMul", value, self._dense(matrix))
            if self._with_ranges and matrix.scales is not None:
                self._output_ranges(name, value, product)
            return product
        before, after = self._ranges[name]
        return self._rounded(self.op("MatMul", self._rounded(value, before), self._dense(matrix)), after)

    def equal_parts(self, value: str, parts: int, each: int) -> list[str]:
        """The same with explicit sizes, which NPU compilers accept."""
        return self.ops("Split", [value, self.integers([each] * parts)], parts, axis=-1)

    def _rounded(self, value: str, bounds: ValueRange) -> str:
        scaling = self.floats(float(bounds.scale)), self._constant(np.asarray(bounds.zero_point))
        return self.op("DequantizeLinear", self.op("QuantizeLinear", value, *scaling), *scaling)

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


class PlainWeightFile(WeightFile):
    """External data whose matrices are stored transposed, except by `gathered`."""

    def _plain(self, pieces: Iterable[NDArray[Any]], rows: int, columns: int, format: WeightFormat) -> Matrix:
        values = self._reserve("f16" if format.kind == "f16" else "f32", (columns, rows))
        columnwise = self._mapped(values, np.dtype(np.float16 if format.kind == "f16" else np.float32), (columns, rows))
        at = 0
        for piece in row_pieces((piece.reshape(-1) for piece in pieces), columns):
            columnwise[:, at : at + len(piece)] = piece.T
            at += len(piece)
            self._progress(piece.size * columnwise.itemsize)
        return Matrix(rows=rows, columns=columns, format=format, values=values)

    def _blocks(self, pieces: Iterable[_Piece], rows: int, columns: int, format: WeightFormat) -> Matrix:
        bits = format.spec.bits if format.spec else 8
        if bits == 4 and rows % 2:
            raise ExportError(f"a matrix of {rows} rows cannot be stored in 4 bits, two to a byte; take int8")
        groups = columns // format.spec.block if format.spec else 1
        scales = self._reserve("f32", (groups, rows) if format.spec else (rows,))
        values = self._reserve("i4" if bits == 4 else "i8", (columns, rows))
        scale_view = self._mapped(scales, np.dtype(np.float32), (groups, rows))
        bytes_of = self._mapped(values, np.dtype(np.uint8), (columns, rows * bits // 8))
        at = 0
        for piece, weighing in _even_rows(pieces):
            levels, factors = _quantized(piece, format, weighing)
            scale_view[:, at : at + len(piece)] = factors.T
            packed: NDArray[np.uint8] = levels.T.astype(np.int8).view(np.uint8)
            if bits == 4:
                packed = np.bitwise_or(packed[:, 0::2] & 15, np.left_shift(packed[:, 1::2], np.uint8(4)), dtype=np.uint8)
            begin = at * bits // 8
            bytes_of[:, begin : begin + packed.shape[1]] = packed
            at += len(piece)
            self._progress(packed.size)
        return Matrix(rows=rows, columns=columns, format=format, values=values, scales=scales)

    def _mapped(self, stored: Stored, kind: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """A tensor's bytes in the file, mapped as an array: its columns are written in pieces that may be far apart."""
        self._file.truncate(self._end)
        self._file.flush()
        return np.memmap(self.path, kind, "r+", stored.offset, shape)


def _quantized(piece: NDArray[np.float32], format: WeightFormat, weighing: Weighing) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    """Signed levels [n, columns] and their scales [n, groups]."""
    if format.spec is not None:
        packed = quantize_matrix(piece, format.spec, weighing.channels, weighing.factor)
        return unpacked_levels(packed).astype(np.int16) - (1 << (format.spec.bits - 1)), packed.scales
    levels, scales = round_rows(piece)
    return levels.astype(np.int16), scales[:, None]


def _even_rows(pieces: Iterable[_Piece]) -> Iterator[_Piece]:
    """The same rows in pieces of an even number of rows; each matrix has an even number, but its pieces may not."""
    left: _Piece | None = None
    for piece, weighing in pieces:
        if left is not None:
            if left[1] is not weighing:
                raise ExportError("matrices of an odd number of rows cannot be stored together in 4 bits; take int8")
            piece, left = np.concatenate([left[0], piece]), None
        even = len(piece) // 2 * 2
        if even < len(piece):
            left = piece[even:], weighing
        if even:
            yield piece[:even], weighing
    if left is not None:
        yield left
