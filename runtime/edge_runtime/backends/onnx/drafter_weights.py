"""The weights of a drafter's graph, as `edge_export.onnx.graphs.drafter` writes it, for the kernels' own drafter.

Matrices, norms and factors are known by their order. Whatever the order, a draft changes speed alone; shapes are checked where they are
packed (kernels/src/draft/model.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_devices.errors import errors_as
from edge_runtime.backends.kernels.draft import DraftLayer, DraftWeights, LevelMatrix, SparseHeadWeights
from edge_runtime.bundle.integrity import read_part
from edge_runtime.bundle.manifest import CacheLayout
from edge_runtime.bundle.onnx_file import MAX_GRAPH_BYTES, Node, OnnxGraph, Tensor, read_graph
from edge_runtime.errors import BackendError

# TensorProto.DataType
_DTYPES: dict[int, type[np.generic]] = {1: np.float32, 2: np.uint8, 3: np.int8, 6: np.int32, 7: np.int64}
_BLOCKS = (128, 64, 32, 16)
_LAYER_MATRICES, _LAYER_NORMS = 4, 5
_FEED_FORWARD = "FeedForwardRows"
_PRODUCTS = {"MatMulRows", _FEED_FORWARD}


class OtherGraphError(Exception):
    """The graph is none that the kernels' drafter computes."""


def read_weights(path: Path, layout: CacheLayout) -> DraftWeights:
    """Returns the weights of the graph at `path`, which has passed `check_onnx`; source n is the n-th of `sources_of`.

    Raises OtherGraphError for weights that are no levels in blocks, and for another number of nodes.
    """
    with _other_graphs():
        return _weights(_Graph(path), layout)


@contextmanager
def _other_graphs() -> Iterator[None]:
    """A node that has fewer inputs or attributes than the exporter's, or a constant of another shape, makes another graph."""
    try:
        yield
    except (IndexError, KeyError, TypeError) as error:
        raise OtherGraphError from error


def _weights(graph: _Graph, layout: CacheLayout) -> DraftWeights:
    layers = len(layout.drafter_sources)
    sources, matrices, (vectors, factors, epsilon) = sources_of(layout), graph.matrices(), graph.norms()
    if len(matrices) != 3 + _LAYER_MATRICES * layers or len(vectors) != 1 + _LAYER_NORMS * layers or len(factors) != layers:
        raise OtherGraphError
    dims = {buffer.layer: buffer.head_dim for buffer in layout.buffers}
    made = []
    for n, source in enumerate(layout.drafter_sources):
        queries, output, gates, down = matrices[1 + _LAYER_MATRICES * n :][:_LAYER_MATRICES]
        own = DraftLayer(
            matrices=(queries, output, *_halves(gates), down),
            norms=tuple(vectors[_LAYER_NORMS * n :][:_LAYER_NORMS]),
            dim=dims[source],
            factor=factors[n],
            source=sources.index(source),
        )
        if any(norm.shape != (own.dim if place == 1 else matrices[0].outputs,) for place, norm in enumerate(own.norms)):
            raise OtherGraphError
        made.append(own)
    embedding, factor = graph.embedding()
    sparse = graph.sparse_head(matrices[-1])
    if vectors[-1].shape != (matrices[0].outputs,) or not made:
        raise OtherGraphError
    return DraftWeights(
        heads=made[0].matrices[0].outputs // made[0].dim,
        epsilon=epsilon,
        before=matrices[0],
        after=matrices[-2],
        layers=tuple(made),
        norm=vectors[-1],
        rows=matrices[-1] if sparse is None else graph.sparse_rows(sparse),
        sparse=sparse,
        embedding=embedding,
        factor=factor,
    )


def sources_of(layout: CacheLayout) -> list[int]:
    """The target's layers whose K/V rows the drafter reads."""
    return sorted(set(layout.drafter_sources))


def channel_scales(path: Path, key: str, value: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns the scales float32 [kv_heads x head_dim] of int8 rows in the buffers `key` and `value`. Raises OtherGraphError."""
    names = [key.encode(), value.encode()]
    with _other_graphs():
        graph = _Graph(path)
        for node in graph.nodes("GroupQueryAttention"):
            if node.inputs[3:5] == names and len(node.inputs) == 14:
                return graph.array(node.inputs[12]).reshape(-1).copy(), graph.array(node.inputs[13]).reshape(-1).copy()
        scales = {node.inputs[0]: node.inputs[1] for node in graph.nodes("DequantizeLinear")}
        keys, values = (graph.array(scales.get(name, b"")).copy() for name in names)
    return keys, values


class _Graph:
    """A drafter's graph: nodes of the loop's body, and constants."""

    def __init__(self, path: Path) -> None:
        whole = read_graph(read_part(path, MAX_GRAPH_BYTES, "graph"))
        bodies: list[OnnxGraph] = [node.graphs[b"body"] for node in whole.nodes if node.operator == "Loop" and b"body" in node.graphs]
        if len(bodies) != 1:
            raise OtherGraphError
        self._folder, self._files = path.parent, dict[str, NDArray[np.uint8]]()
        self._nodes = [*whole.nodes, *bodies[0].nodes]
        self._constants: dict[bytes, Tensor] = {**whole.constants, **bodies[0].constants}

    def nodes(self, operator: str) -> list[Node]:
        """The nodes with this operator, in order."""
        return [node for node in self._nodes if node.operator == operator]

    def array(self, name: bytes) -> NDArray[Any]:
        """A constant's values, mapped where they lie in a file. Raises OtherGraphError if it is none."""
        constant = self._constants.get(name)
        if constant is None or constant.type not in _DTYPES:
            raise OtherGraphError
        dtype = np.dtype(_DTYPES[constant.type])
        if constant.external is None:
            if constant.raw is None or len(constant.raw) != prod(constant.shape) * dtype.itemsize:
                raise OtherGraphError
            return np.frombuffer(constant.raw, dtype).reshape(constant.shape)
        mapped, first = self._mapped(constant.external["location"]), int(constant.external.get("offset", 0))
        return mapped[first : first + prod(constant.shape) * dtype.itemsize].view(dtype).reshape(constant.shape)

    def _mapped(self, name: str) -> NDArray[np.uint8]:
        """A file of weights, mapped once: each mapping takes a descriptor. Raises BackendError where that is not possible."""
        if name not in self._files:
            with errors_as(
                BackendError, f"{self._folder / name} cannot be mapped", "check the file, or free some memory", OSError, ValueError
            ):
                self._files[name] = np.asarray(np.memmap(self._folder / name, np.uint8, "r"))
        return self._files[name]

    def matrices(self) -> list[LevelMatrix]:
        """The matrices of all products, in order."""
        found = []
        for node in self._nodes:
            if node.operator in _PRODUCTS:
                found.append(self._levels(node.inputs[1:3], node.numbers))
            if node.operator == _FEED_FORWARD:
                second = {name.removeprefix(b"second_"): number for name, number in node.numbers.items() if name.startswith(b"second_")}
                found.append(self._levels(node.inputs[3:], second))
        return found

    def norms(self) -> tuple[list[NDArray[Any]], list[float], float]:
        """The weights of all norms, in order, the numbers that layers multiply their output with, and the epsilon of the first norm."""
        weights, factors, epsilon = list[bytes](), list[bytes](), 0.0
        for node in self._nodes:
            if node.operator == "NormRows":
                weights += node.inputs[1:]
                epsilon = epsilon or float(node.numbers.get(b"epsilon", 0))
            elif node.operator == "ResidualRows":
                weights += [node.inputs[2], *node.inputs[4:]]
                factors += node.inputs[3:4]
        numbers = [self.array(name) for name in factors if name]
        if any(number.size != 1 for number in numbers):
            raise OtherGraphError
        return [self.array(name).copy() for name in weights if name], [float(number.reshape(-1)[0]) for number in numbers], epsilon

    def _levels(self, names: list[bytes], numbers: Mapping[bytes, float]) -> LevelMatrix:
        """`names` are those of levels and of scales."""
        if len(names) != 2:
            raise OtherGraphError
        levels, scales = map(self.array, names)
        outputs, columns, bits, block = (int(numbers.get(name, 0)) for name in (b"N", b"K", b"bits", b"block_size"))
        if block not in _BLOCKS or (levels.nbytes, scales.size) != (outputs * columns * bits // 8, outputs * columns // block):
            raise OtherGraphError
        scales = np.ascontiguousarray(scales, np.float32)
        return LevelMatrix(levels=levels, scales=scales, outputs=outputs, inputs=columns, bits=bits, block=block)

    def embedding(self) -> tuple[LevelMatrix, float]:
        """The target's embedding, and the factor of its rows."""
        (gathered, *_), factors = self.nodes("GatherBlockQuantized") or (None,), self.nodes("Mul")
        if gathered is None or len(gathered.inputs) != 3 or not factors or gathered.outputs[0] not in factors[0].inputs:
            raise OtherGraphError
        table, numbers = self._constants.get(gathered.inputs[0]), gathered.numbers
        if table is None or len(table.shape) != 2 or not numbers.get(b"bits"):
            raise OtherGraphError
        shape = {b"N": table.shape[0], b"K": table.shape[1] * 8 // numbers[b"bits"]}
        levels = self._levels([gathered.inputs[0], gathered.inputs[2]], {**numbers, **shape})
        factor = self.array(factors[0].inputs[1])
        if factor.size != 1:
            raise OtherGraphError
        return levels, float(factor.reshape(-1)[0])

    def sparse_head(self, centroids: LevelMatrix) -> SparseHeadWeights | None:
        """None where the head scores all tokens."""
        best = self.nodes("TopK")
        if not best:
            return None
        top, order = self.array(best[0].inputs[1]), self.array(self._gathers()[0])
        if top.size != 1 or order.dtype != np.int32 or order.ndim != 2:
            raise OtherGraphError
        return SparseHeadWeights(centroids=centroids, order=order.copy(), top=int(top.reshape(-1)[0]))

    def _gathers(self) -> list[bytes]:
        """What is gathered by the best centroids: tokens, their rows transposed, the rows' scales."""
        names = [node.inputs[0] for node in self.nodes("Gather") if node.inputs[0] in self._constants]
        if len(names) != 3:
            raise OtherGraphError
        return names

    def sparse_rows(self, head: SparseHeadWeights) -> LevelMatrix:
        """The output rows [tokens in the order of centroids, hidden size], in 8 bits with a scale for each."""
        (_, rows_name, scales_name), hidden = self._gathers(), head.centroids.inputs
        rows, scales = self.array(rows_name), self.array(scales_name)
        count, each = head.order.shape
        if rows.shape != (count, hidden, each) or rows.itemsize != 1 or scales.size != count * each:
            raise OtherGraphError
        block = next((block for block in _BLOCKS if hidden % block == 0), 0)
        if not block:
            raise OtherGraphError
        levels = np.ascontiguousarray(rows.transpose(0, 2, 1)).view(np.uint8).reshape(count * each, hidden)
        if rows.dtype == np.int8:  # older exports: the zero point is 0
            levels ^= 128
        scales = np.repeat(scales.reshape(-1, 1).astype(np.float32), hidden // block, axis=1)
        return LevelMatrix(levels=levels, scales=scales, outputs=count * each, inputs=hidden, bits=8, block=block)


def _halves(gates: LevelMatrix) -> tuple[LevelMatrix, LevelMatrix]:
    """The matrices of gates and of values, which the graph has as one."""
    half, row = gates.outputs // 2, gates.inputs * gates.bits // 8
    levels, scales = gates.levels.reshape(-1)[: 2 * half * row].reshape(2, -1), gates.scales.reshape(-1).reshape(2, -1)
    first, second = (
        LevelMatrix(levels=levels[n], scales=scales[n], outputs=half, inputs=gates.inputs, bits=gates.bits, block=gates.block)
        for n in (0, 1)
    )
    return first, second
