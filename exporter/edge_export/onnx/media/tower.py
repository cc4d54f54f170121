"""What both towers have in common: stored weights by name, clipped products, norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.safetensors import read_rows, read_values
from edge_export.onnx.graph_builder import GraphBuilder
from edge_export.onnx.weights import WeightFile, WeightFormat

EPSILON = 1e-6


class Tower:
    """A graph of a tower being built, and the tensors of the checkpoint that it reads, whose names begin with `prefix`.

    `format` is that of the layers' matrices; the few outside of the layers are never in blocks.
    """

    def __init__(self, graph: GraphBuilder, checkpoint: Checkpoint, weights: WeightFile, format: WeightFormat, prefix: str) -> None:
        self.graph = graph
        self._checkpoint, self._weights, self._format, self._prefix = checkpoint, weights, format, prefix
        self._outer = WeightFormat(kind="f16") if format.kind == "blocks" else format

    def values(self, name: str) -> NDArray[np.float32]:
        """Returns a tensor."""
        return read_values(self._checkpoint.others[self._prefix + name])

    def stored(self, values: NDArray[np.floating[Any]]) -> str:
        """Puts values into the data file as float32."""
        return self.graph.weight(self._weights.array(values.astype(np.float32), "f32"))

    def vector(self, name: str, factor: float = 1.0) -> str:
        """A small tensor in the data file, times a factor."""
        return self.stored(self.values(name) * np.float32(factor))

    def linear(self, value: str, name: str, *, outer: bool = False) -> str:
        """value times the transposed matrix `name`; `outer`: a matrix outside of the layers, whose name is complete."""
        full = name if outer else f"{self._prefix}{name}"
        tensor = self._checkpoint.others[full]
        rows, columns = tensor.shape
        matrix = self._weights.matrix_of(read_rows(tensor), full, rows, columns, self._outer if outer else self._format)
        return self.graph.linear(value, matrix)

    def clipped(self, value: str, name: str) -> str:
        """A product whose input and output are clipped, if the checkpoint has bounds."""
        value = self._clip(value, name, "input")
        return self._clip(self.linear(value, f"{name}.linear.weight"), name, "output")

    def _clip(self, value: str, name: str, side: str) -> str:
        if f"{self._prefix}{name}.{side}_min" not in self._checkpoint.others:
            return value
        bounds = [float(self.values(f"{name}.{side}_{end}").reshape(-1)[0]) for end in ("min", "max")]
        if not np.isfinite(bounds).any():
            return value
        return self.graph.op("Clip", value, *(self.graph.floats(np.array(bound, np.float32)) for bound in bounds))

    def norm(self, value: str, name: str, factor: float = 1.0) -> str:
        """RMS norm with the weight `name`, times a factor."""
        weight = self.values(f"{name}.weight") * np.float32(factor)
        return self._normed(value, self.stored(weight), len(weight))

    def plain_norm(self, value: str, size: int) -> str:
        """RMS norm of rows of `size` without a weight."""
        return self._normed(value, self.graph.floats(np.ones(size, np.float32)), size)

    def _normed(self, value: str, weight: str, width: int) -> str:
        normed = self.graph.fresh("normed")
        with self.graph.kernel("NormRows", [value, weight], [normed], epsilon=EPSILON, width=width) as body:
            body.graph.op("RMSNormalization", *body.inputs, name=body.outputs[0], axis=-1, epsilon=EPSILON)
        return normed

    def added(self, value: str, branch: str, name: str, factor: float = 1.0) -> str:
        """value plus the RMS norm of a branch with the weight `name`, times a factor."""
        weight, total = self.values(f"{name}.weight") * np.float32(factor), self.graph.fresh("sum")
        inputs = [value, branch, self.stored(weight), "", ""]
        with self.graph.kernel("ResidualRows", inputs, [total], epsilon=EPSILON, width=len(weight)) as body:
            rows, other, scale, *_ = body.inputs
            normed = body.graph.op("RMSNormalization", other, scale, axis=-1, epsilon=EPSILON)
            body.graph.op("Add", rows, normed, name=body.outputs[0])
        return total

    def shaped(self, value: str, shape: Sequence[int]) -> str:
        """The value in another shape; -1 is a size known at run time."""
        return self.graph.op("Reshape", value, self.graph.integers(shape))

    def turned(self, value: str, *order: int) -> str:
        """The value with its axes in another order."""
        return self.graph.op("Transpose", value, perm=list(order))
