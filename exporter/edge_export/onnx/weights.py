"""Weights of ONNX graphs: the format of each matrix, and the data files, which are written piece by piece while graphs are built.

int4 is mixed unless a block size is requested. Most matrices then have 4 bits in blocks of 64. The embedding and the layers' weights that
lose most by rounding have 8 bits in blocks of 128, except K and V, which have 8 bits in blocks of 32, as all of an int8 target has.
Figures: docs/design/quantization.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.safetensors import StoredTensor, read_codes, read_rows, read_values
from edge_export.checkpoint.weight_formats import lies_on_grid
from edge_export.errors import ExportError
from edge_export.onnx.block_quantization import WeightSpec, quantize_matrix, round_rows
from edge_export.onnx.request import WEIGHT_TYPES, OnnxRequest, OnnxWeights
from edge_export.quantization.importance import Importance, Weighing

ValueType = Literal["f32", "f16", "u8", "i32", "i8", "i4"]
VALUE_BITS: dict[ValueType, int] = {"f32": 32, "f16": 16, "u8": 8, "i32": 32, "i8": 8, "i4": 4}
_FLOATS: dict[str, type[np.floating[Any]]] = {"f32": np.float32, "f16": np.float16}
_Piece = tuple[NDArray[np.float32], Weighing]
# Alignment of large and of small tensors. Large ones begin on a page, so that they can be memory-mapped.
_PAGE, _LINE = 4096, 64
# The block size of the 4-bit matrices of mixed int4. Blocks of 32 lose less, but a row takes longer.
_MIXED_BLOCK = 64
# The block size of K and V, which are a hundredth of the weights and lose much by rounding. V is normed, so an error counts much in a row
# of small norm, such as that of the first token, which most rows attend to.
_VALUES_BLOCK = 32
# The device that requires integers with one scale for each channel.
_CHANNELS = "qnn"


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How matrices are stored: as "f32", as "f16", or as integers in blocks.

    Three kinds of a layer's matrices may have formats of their own. `sensitive` is for the weights whose rounding costs most: the
    feed-forward's down projection and the projection back from per-layer embeddings. `values` is for K and V. `off_grid` is for matrices
    that do not lie on a 4-bit grid, in a checkpoint that was trained for one.
    """

    kind: Literal["f32", "f16", "blocks"]
    spec: WeightSpec | None = None
    sensitive: WeightFormat | None = None
    values: WeightFormat | None = None
    off_grid: WeightFormat | None = None

    @property
    def float_type(self) -> Literal["f32", "f16"]:
        """The type that a matrix has if it is stored as floats."""
        return "f16" if self.kind == "f16" else "f32"

    def for_tensors(self, tensors: Sequence[StoredTensor]) -> WeightFormat:
        """Returns the format of a matrix made of these tensors. Raises CheckpointError if one cannot be read."""
        if self.off_grid is None or all(lies_on_grid(tensor) for tensor in tensors):
            return self
        return self.off_grid

    def for_columns(self, columns: int) -> WeightFormat:
        """Returns the format of a matrix with this many columns: if its blocks do not divide them, blocks of 32, else float32."""
        if self.spec is None or columns % self.spec.block == 0:
            return self
        if columns % 32 == 0:
            return WeightFormat(kind="blocks", spec=WeightSpec(bits=self.spec.bits, block=32))
        return WeightFormat(kind="f32")


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in an external data file; `location` is the file's name."""

    type: ValueType
    shape: tuple[int, ...]
    location: str
    offset: int
    length: int

    def shaped(self, *shape: int) -> Stored:
        """Returns the same bytes under another shape."""
        return replace(self, shape=shape)

    def rows_between(self, first: int, end: int) -> Stored:
        """Returns the part from `first` to `end` along the first axis."""
        each = self.length // self.shape[0]
        return replace(self, shape=(end - first, *self.shape[1:]), offset=self.offset + first * each, length=(end - first) * each)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A stored matrix [rows, columns]. In blocks, `values` is uint8 [rows, columns/block, block*bits/8], `scales` [rows, columns/block].

    `rounding` is None, or the scales by which a product's input and output are rounded to int8, where 0 means not rounded. `parts` is not
    empty if the matrix is several matrices stacked by rows; each then has its own product.
    """

    rows: int
    columns: int
    format: WeightFormat
    values: Stored
    scales: Stored | None = None
    rounding: tuple[float, float] | None = None
    parts: tuple[Matrix, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """The attributes of operators on block-quantized matrices; empty if the matrix is not in blocks."""
        spec = self.format.spec
        return {} if spec is None else {"K": self.columns, "N": self.rows, "bits": spec.bits, "block_size": spec.block}

    def regrouped(self, rows: int) -> Matrix:
        """Returns the same bytes as a matrix of `rows` longer rows. Each new row is several of the old ones."""
        columns = self.rows * self.columns // rows
        blocks = columns // self.format.spec.block if self.format.spec else 0
        return Matrix(
            rows=rows,
            columns=columns,
            format=self.format,
            values=self.values.shaped(rows, columns) if not self.format.spec else self.values,
            scales=self.scales.shaped(rows, blocks) if self.scales else None,
        )

    def between(self, first: int, end: int) -> Matrix:
        """Returns the rows from `first` to `end`, as a part of the same stored bytes."""
        if (first, end) == (0, self.rows):
            return self
        scales = self.scales and self.scales.rows_between(first, end)
        return replace(self, rows=end - first, values=self.values.rows_between(first, end), scales=scales)


class WeightFile:
    """Writes the external data of one or more graphs. Use it as a context manager; `progress` gets the bytes since its last call."""

    def __init__(self, path: Path, progress: Callable[[int], None] = lambda _: None, importance: Importance | None = None) -> None:
        self.path = path
        self._progress = progress
        self._importance = importance
        self._end = 0
        self._file = path.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.truncate(self._end)
        self._file.close()

    def array(self, values: NDArray[Any], kind: ValueType) -> Stored:
        """Stores a small array."""
        stored = self._reserve(kind, values.shape)
        self._write(stored, 0, values)
        return stored

    def pieces(self, pieces: Iterable[NDArray[Any]], kind: ValueType, shape: tuple[int, ...]) -> Stored:
        """Stores an array of this shape that arrives in pieces."""
        stored = self._reserve(kind, shape)
        written = 0
        for piece in pieces:
            written += self._write(stored, written, piece)
        return stored

    def vector(self, checkpoint: Checkpoint, name: str, factor: float = 1.0) -> Stored:
        """Stores a tensor of the checkpoint as float32, multiplied by `factor`."""
        return self.array(read_values(checkpoint.tensors[name]) * np.float32(factor), "f32")

    def matrix(self, checkpoint: Checkpoint, names: Sequence[str], format: WeightFormat) -> Matrix:
        """Stores tensors [n, columns] of the checkpoint as one matrix, stacked by rows."""
        tensors = [checkpoint.tensors[name] for name in names]
        if any(name in checkpoint.rounding for name in names):
            return self._trained(checkpoint, names, format)
        if checkpoint.rounding and format.kind == "blocks":
            # Training for quantization rounded all matrices except a few. These stay in floats.
            format = WeightFormat(kind="f16")
        rows, columns = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
        format = format.for_tensors(tensors).for_columns(columns)
        if format.kind != "blocks":
            return self._plain((piece for tensor in tensors for piece in read_rows(tensor, format.float_type)), rows, columns, format)
        pieces = (
            (piece, weighing)
            for weighing, tensor in ((self._weighing(name, tensor), tensor) for name, tensor in zip(names, tensors, strict=True))
            for piece in read_rows(tensor)
        )
        return self._blocks(pieces, rows, columns, format)

    def _trained(self, checkpoint: Checkpoint, names: Sequence[str], format: WeightFormat) -> Matrix:
        """Stores matrices whose activations are rounded, each by its own scales. Their codes are copied unchanged."""
        parts = []
        for name in names:
            tensor = checkpoint.tensors[name]
            made = self.codes(tensor) if format.kind == "blocks" and tensor.bits else None
            if made is None:
                rows, columns = tensor.shape
                kind = format.float_type
                made = self._plain(read_rows(tensor, kind), rows, columns, WeightFormat(kind=kind))
            parts.append(replace(made, rounding=checkpoint.rounding.get(name)))
        if len(parts) == 1:
            return parts[0]
        return replace(parts[0], rows=sum(part.rows for part in parts), rounding=None, parts=tuple(parts))

    def codes(self, tensor: StoredTensor) -> Matrix | None:
        """Stores the codes of a trained matrix unchanged. Returns None if no block size divides the part of a row that shares a scale."""
        assert tensor.scales is not None
        scales, (rows, columns) = read_values(tensor.scales), tensor.shape
        each = columns // scales.shape[1]
        block = next((size for size in (128, 64, 32) if each % size == 0), None)
        if block is None:
            return None
        blocks, spec = columns // block, WeightSpec(bits=tensor.bits, block=block)
        values = self.pieces(read_codes(tensor), "u8", (rows, blocks, block * tensor.bits // 8))
        factors = self.array(np.repeat(scales, each // block, axis=1), "f32")
        return Matrix(rows=rows, columns=columns, format=WeightFormat(kind="blocks", spec=spec), values=values, scales=factors)

    def matrix_in(self, tensor: StoredTensor, name: str, index: int, format: WeightFormat) -> Matrix:
        """Stores one matrix [rows, columns]: number `index` of those in the tensor `name`."""
        rows, columns = tensor.shape
        return self.matrix_of(read_rows(tensor), name, rows, columns, format.for_tensors([tensor]), index)

    def matrix_of(
        self, pieces: Iterable[NDArray[np.float32]], name: str, rows: int, columns: int, format: WeightFormat, index: int = 0
    ) -> Matrix:
        """Stores a matrix given in float32 pieces of complete rows. They are rows of the tensor `name`, in any order."""
        format = format.for_columns(columns)
        if format.kind != "blocks":
            return self._plain((piece.astype(_FLOATS[format.float_type], copy=False) for piece in pieces), rows, columns, format)
        weighing = self._weighing(name, index=index)
        return self._blocks(((piece, weighing) for piece in pieces), rows, columns, format)

    def gathered(self, pieces: Iterable[NDArray[np.float32]], rows: int, columns: int, format: WeightFormat) -> Matrix:
        """Stores float rows that a graph gathers. They are never transposed, whatever the kind of file."""
        floats = (piece.astype(_FLOATS[format.float_type], copy=False) for piece in pieces)
        return WeightFile._plain(self, floats, rows, columns, format)

    def _weighing(self, name: str, tensor: StoredTensor | None = None, index: int = 0) -> Weighing:
        """Returns how errors in a tensor are weighted, or in one of its matrices. Without `tensor`, errors are not compensated."""
        if self._importance is None:
            return Weighing()
        channels = self._importance.of(name)
        factor = None if tensor is None else self._importance.factor(name, tensor)
        return Weighing(channels=None if channels is None else channels[index], factor=factor)

    def _plain(self, pieces: Iterator[NDArray[Any]], rows: int, columns: int, format: WeightFormat) -> Matrix:
        stored = self.pieces(pieces, format.float_type, (rows, columns))
        return Matrix(rows=rows, columns=columns, format=format, values=stored)

    def _blocks(self, pieces: Iterable[_Piece], rows: int, columns: int, format: WeightFormat) -> Matrix:
        spec = format.spec
        assert spec is not None
        blocks = columns // spec.block
        scales = self._reserve("f32", (rows, blocks))
        values = self._reserve("u8", (rows, blocks, spec.block * spec.bits // 8))
        at = [0, 0]
        for piece, weighing in pieces:
            packed = quantize_matrix(piece, spec, weighing.channels, weighing.factor)
            at[0] += self._write(scales, at[0], packed.scales)
            at[1] += self._write(values, at[1], packed.packed)
        return Matrix(rows=rows, columns=columns, format=format, values=values, scales=scales)

    def _reserve(self, kind: ValueType, shape: tuple[int, ...]) -> Stored:
        length = -(-int(np.prod(shape, dtype=np.int64)) * VALUE_BITS[kind] // 8)
        step = _PAGE if length >= _PAGE else _LINE
        offset = -(-self._end // step) * step
        self._end = offset + length
        return Stored(type=kind, shape=shape, location=self.path.name, offset=offset, length=length)

    def _write(self, stored: Stored, at: int, values: NDArray[Any]) -> int:
        data = np.ascontiguousarray(values).data.cast("B")
        if at + len(data) > stored.length:
            raise ExportError(
                f"{self.path.name}: {at + len(data)} bytes for a tensor of {stored.length}; the checkpoint changed while it was read"
            )
        self._file.seek(stored.offset + at)
        self._file.write(data)
        self._progress(len(data))
        return len(data)


class PlainWeightFile(WeightFile):
    """Writes external data with matrices transposed to [columns, rows], as a plain MatMul needs them. `gathered` does not transpose.

    Integers have the format of DequantizeLinear of opset 21: signed and symmetric, with one scale for each block of a column or for each
    column. Two 4-bit levels share a byte, the first in the low half (ONNX, onnx.in.proto, INT4).
    """

    def _plain(self, pieces: Iterable[NDArray[Any]], rows: int, columns: int, format: WeightFormat) -> Matrix:
        values = self._reserve(format.float_type, (columns, rows))
        columnwise = self._mapped(values, np.dtype(_FLOATS[format.float_type]), (columns, rows))
        at = 0
        for piece in pieces:
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
        """Maps a tensor's bytes in the file as an array, because its columns are written in pieces that may be far apart."""
        self._file.truncate(self._end)
        self._file.flush()
        return np.memmap(self.path, kind, "r+", stored.offset, shape)


def _quantized(piece: NDArray[np.float32], format: WeightFormat, weighing: Weighing) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    """Returns signed levels [n, columns] and their scales [n, groups]."""
    if format.spec is not None:
        packed = quantize_matrix(piece, format.spec, weighing.channels, weighing.factor)
        return packed.levels().astype(np.int16) - (1 << (format.spec.bits - 1)), packed.scales
    levels, scales = round_rows(piece)
    return levels.astype(np.int16), scales[:, None]


def _even_rows(pieces: Iterable[_Piece]) -> Iterator[_Piece]:
    """Yields the same rows in pieces of an even number of rows. Every matrix has an even number of rows, but its pieces may not."""
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


def weight_format(weights: OnnxWeights, request: OnnxRequest) -> WeightFormat:
    """Returns the format of a model's layers for this weight type."""
    form = WEIGHT_TYPES[weights]
    if form.kind != "blocks" or request.device == _CHANNELS:
        return WeightFormat(kind=form.kind)
    format = WeightFormat(kind="blocks", spec=WeightSpec(bits=form.bits, block=request.block_size))
    if not request.mixed(weights):
        return format
    values, sensitive = (WeightFormat(kind="blocks", spec=WeightSpec(bits=8, block=block)) for block in (_VALUES_BLOCK, request.block_size))
    return replace(format, spec=WeightSpec(bits=4, block=_MIXED_BLOCK), sensitive=sensitive, values=values)


def layers_format(request: OnnxRequest) -> WeightFormat:
    """Returns the format of the target's layers."""
    return _target_format(request.target, request.of_target)


def table_format(request: OnnxRequest) -> WeightFormat:
    """Returns the format of the target's token embedding."""
    return _target_format(request.table, request.of_target)


def _target_format(weights: OnnxWeights, request: OnnxRequest) -> WeightFormat:
    format = weight_format(weights, request)
    return replace(format, off_grid=weight_format("int8", request)) if request.on_grid and weights == "int4" else format


def head_format(request: OnnxRequest, *, sparse: bool) -> WeightFormat:
    """Returns the format of the drafter's output rows. It has at least 8 bits: the rows are few, and an error in them spoils drafts.

    In graphs of fixed shapes, the rows of a sparse head are floats, because they are gathered.
    """
    format = weight_format("int8" if request.drafter == "int4" else request.drafter, request)
    return WeightFormat(kind="f16") if sparse and request.device is not None and format.kind == "blocks" else format


def quantization_name(role: str, request: OnnxRequest) -> str:
    """Returns the manifest's name for the weight format of the file with this role."""
    drafter = role.startswith("drafter")
    request = request if drafter else request.of_target
    weights = request.drafter if drafter else request.target
    if WEIGHT_TYPES[weights].kind != "blocks":
        return weights
    if request.device == _CHANNELS:
        return f"{weights}-channel"
    return f"{weights}-mixed" if request.mixed(weights) else f"{weights}-b{request.block_size}"
