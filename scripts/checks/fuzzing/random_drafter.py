"""Random drafters and K/V rows of any type, as the kernels' drafter takes them (edge_runtime.backends.kernels.draft)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.kernels.draft import (
    DraftLayer,
    DraftWeights,
    GgufMatrix,
    LevelMatrix,
    Matrix,
    NativeDraft,
    SparseHeadWeights,
)
from edge_runtime.backends.kernels.loader import address_of

Array = NDArray[Any]
# Types of matrices: floats of 32 and 16 bits, GGUF's q4_0 and q8_0, and levels as ONNX graphs have them.
MATRICES = ("f32", "f16", "q4_0", "q8_0", "int4", "int8")
_GGUF = {"f32": (0, 1, 4), "f16": (1, 1, 2), "q4_0": (2, 32, 18), "q8_0": (8, 32, 34)}
# Rows of keys and values by their type's number: values and bytes of a unit.
ROW_UNITS = ((1, 4), (1, 2), (32, 34), (32, 18), (1, 1))


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A drafter's sizes; no `centroids` for a dense head. `dims` are those of each layer's heads, `kv_heads` those of its source."""

    hidden: int = 64
    target: int = 96
    feed: int = 96
    heads: int = 4
    dims: tuple[int, ...] = (32, 64)
    kv_heads: tuple[int, ...] = (1, 2)
    centroids: int = 8
    per_centroid: int = 16
    top: int = 3

    @property
    def vocabulary(self) -> int:
        return (self.centroids or 8) * self.per_centroid


@dataclass(frozen=True)
class Rows:
    """Keys and values [kv_heads, rows, bytes], cosines and sines [dim / 2], which rows are read, scales [kv_heads, dim] of int8 rows."""

    type: int
    keys: Array
    values: Array
    cosine: Array
    sine: Array
    cells: Array | None = None
    scales: tuple[Array, Array] | None = None
    turns: tuple[int, int] = (0, 0)

    def describe(self, draft: NativeDraft, place: int) -> None:
        """Fills in the drafter's source of that number, where the rows may be of types that no NumPy array has."""
        source = draft.sources[place]

        def address(array: Array) -> int:
            return address_of(array, array.dtype, array.size)

        source.type, source.kv_heads = self.type, len(self.keys)
        source.count = self.keys.shape[1] if self.cells is None else len(self.cells)
        source.keys, source.values = address(self.keys), address(self.values)
        source.key_step, source.value_step = self.keys.shape[2], self.values.shape[2]
        source.key_head, source.value_head = self.keys[0].nbytes, self.values[0].nbytes
        source.cells = None if self.cells is None else address(self.cells)
        source.key_scales, source.value_scales = map(address, self.scales) if self.scales else (None, None)
        source.cosine, source.sine = draft.rotations(place, self.cosine, self.sine)
        source.key_turn, source.value_turn = self.turns


def _own(array: Array) -> Array:
    return np.ascontiguousarray(array)


@dataclass(frozen=True)
class RandomDrafters:
    """Makes drafters; `place` puts each array where it shall lie."""

    random: np.random.Generator
    place: Callable[[Array], Array] = field(default=_own)

    def matrix(self, kind: str, outputs: int, inputs: int) -> Matrix:
        """A matrix of about unit gain."""
        random, place = self.random, self.place
        if kind in ("int4", "int8"):
            bits, block = int(kind[3:]), 32 if inputs % 64 else 64
            levels = random.integers(0, 256, (outputs, inputs * bits // 8)).astype(np.uint8)
            scales = (random.random((outputs, inputs // block)) / 2**bits / inputs**0.5).astype(np.float32)
            return LevelMatrix(levels=place(levels), scales=place(scales), outputs=outputs, inputs=inputs, bits=bits, block=block)
        type_, each, size = _GGUF[kind]
        if each == 1:
            values = (random.standard_normal((outputs, inputs)) / inputs**0.5).astype(np.float32 if size == 4 else np.float16)
            data = values.view(np.uint8)
        else:
            data = random.integers(0, 256, (outputs, inputs // each, size)).astype(np.uint8)
            data[..., :2] = (random.random((outputs, inputs // each, 1)) / 2 ** (size // 4) / inputs**0.5).astype(np.float16).view(np.uint8)
            data = data.reshape(outputs, -1)
        return GgufMatrix(type=type_, data=place(data), outputs=outputs, inputs=inputs)

    def vector(self, size: int) -> Array:
        """Weights of a norm."""
        return self.place((0.5 + self.random.random(size)).astype(np.float32))

    def weights(self, sizes: Sizes, kind: str) -> DraftWeights:
        """A drafter whose matrices are of this kind; its embedding is float32 or levels."""
        hidden, wide = sizes.hidden, [sizes.heads * dim for dim in sizes.dims]
        layers = [
            DraftLayer(
                matrices=tuple(
                    self.matrix(kind, *shape)
                    for shape in ((width, hidden), (hidden, width), (sizes.feed, hidden), (sizes.feed, hidden), (hidden, sizes.feed))
                ),
                norms=tuple(map(self.vector, (hidden, dim, hidden, hidden, hidden))),
                dim=dim,
                factor=0.75,
                source=n,
            )
            for n, (dim, width) in enumerate(zip(sizes.dims, wide, strict=True))
        ]
        sparse = None
        if sizes.centroids:
            order = self.random.permutation(sizes.vocabulary).astype(np.int32).reshape(sizes.centroids, -1)
            sparse = SparseHeadWeights(centroids=self.matrix(kind, sizes.centroids, hidden), order=self.place(order), top=sizes.top)
        return DraftWeights(
            heads=sizes.heads,
            epsilon=1e-6,
            before=self.matrix(kind, hidden, 2 * sizes.target),
            after=self.matrix(kind, sizes.target, hidden),
            layers=tuple(layers),
            norm=self.vector(hidden),
            rows=self.matrix(kind, sizes.vocabulary, hidden),
            sparse=sparse,
            embedding=self.matrix(kind if kind.startswith("int") else "f32", sizes.vocabulary, sizes.target),
            factor=sizes.target**0.5,
        )

    def rows(self, type_: int, kv_heads: int, dim: int, count: int, *, listed: bool = False) -> Rows:
        """Random K/V rows; with `listed` some of them are read, in any order."""
        random, (each, size) = self.random, ROW_UNITS[type_]
        parts = []
        for _ in range(2):
            values = random.standard_normal((kv_heads, count, dim)).astype(np.float32)
            if type_ == 0:
                data = values.view(np.uint8)
            elif type_ == 1:
                data = values.astype(np.float16).view(np.uint8)
            else:
                data = random.integers(0, 256, (kv_heads, count, dim // each, size)).astype(np.uint8)
                if each > 1:
                    data[..., :2] = (random.random((kv_heads, count, dim // each, 1)) / 2 ** (size // 4)).astype(np.float16).view(np.uint8)
            parts.append(self.place(data.reshape(kv_heads, count, -1)))
        angles = random.random(dim // 2) * 6
        cells = random.permutation(count)[: max(1, count * 3 // 4)].astype(np.int32) if listed else None
        scales = [self.place((random.random((kv_heads, dim)) / 64).astype(np.float32)) for _ in range(2)] if type_ == 4 else None
        return Rows(
            type_,
            *parts,
            self.place(np.cos(angles).astype(np.float32)),
            self.place(np.sin(angles).astype(np.float32)),
            None if cells is None else self.place(cells),
            None if scales is None else (scales[0], scales[1]),
        )
