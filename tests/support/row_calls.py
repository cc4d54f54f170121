"""Calls of the row kernels' plain C functions, on this machine's processor and, written down, on an emulated one."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.kernels.loader import load_library

Array = NDArray[Any]
# Types of GGUF files (enum ggml_type): inputs and bytes of a block, and where its float16 numbers lie.
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K = 2, 3, 6, 7, 8, 12, 13, 14
GGUF_BLOCKS = {
    Q4_0: (32, 18),
    Q4_1: (32, 20),
    Q5_0: (32, 22),
    Q5_1: (32, 24),
    Q8_0: (32, 34),
    Q4_K: (256, 144),
    Q5_K: (256, 176),
    Q6_K: (256, 210),
}
HALVES = {
    **dict.fromkeys((Q4_0, Q5_0, Q8_0), slice(0, 2)),
    **dict.fromkeys((Q4_1, Q5_1, Q4_K, Q5_K), slice(0, 4)),
    Q6_K: slice(208, 210),
}
# Rows of keys and values by number of their type, float16, 8 bits, 4 bits: values and bytes of a block.
CELL_BLOCKS = {0: (1, 2), 1: (32, 34), 2: (32, 18)}


@dataclass(frozen=True)
class Call:
    """One call: the function behind "edge_rows_", its sizes, its arrays, and the shape of its float32 result."""

    function: str
    sizes: tuple[int, ...]
    arrays: tuple[Array, ...]
    shape: tuple[int, ...]

    def here(self, variant: str) -> NDArray[np.float32]:
        """The result of a variant of this machine's processor. Raises ValueError where the call is refused."""
        out = np.full(self.shape, np.nan, np.float32)
        sizes = [ctypes.c_int64(size) for size in self.sizes]
        kept = [np.ascontiguousarray(array) for array in self.arrays]
        arrays = [ctypes.c_void_p(array.ctypes.data) for array in (*kept, out)]
        match self.function:
            case "multiply":
                words = [*sizes[:2], *map(ctypes.c_int, self.sizes[2:4]), *arrays[:3], sizes[4], arrays[3]]
            case "multiply_gguf":
                words = [ctypes.c_int(self.sizes[0]), *sizes[1:4], *arrays[:2], sizes[4], arrays[2]]
            case _:  # all arrays, all sizes, the result
                words = [*arrays[:-1], *sizes, arrays[-1]]
        if getattr(load_library(), f"edge_rows_{self.function}")(variant.encode(), *words):
            raise ValueError(f"{self.function} of {self.sizes} was refused")
        return out

    def written(self, variant: str) -> bytes:
        """The call as emulated_rows.cpp reads it."""
        arrays = [np.ascontiguousarray(array).tobytes() for array in self.arrays]
        lengths = [*map(len, arrays), *[0] * (5 - len(arrays)), int(np.prod(self.shape)) * 4]
        sizes = [*self.sizes, *[0] * (8 - len(self.sizes))]
        return struct.pack("16s16s8q6q", self.function.encode(), variant.encode(), *sizes, *lengths) + b"".join(arrays)


def unread_rows() -> int:
    """How many rows of products this process has left out of graphs of ggml so far, because nothing reads them."""
    kernels = load_library()
    kernels.edge_ggml_unread_rows.restype = ctypes.c_int64
    return int(kernels.edge_ggml_unread_rows())


def multiplication(levels: Array, scales: Array, bits: int, block: int, values: Array) -> Call:
    """Levels [outputs, inputs * bits / 8] and scales [outputs, blocks], as MatMulNBits stores them, by values [rows, inputs]."""
    outputs, inputs = len(levels), levels.shape[1] * 8 // bits
    return Call("multiply", (outputs, inputs, bits, block, len(values)), (levels, scales, values), (len(values), outputs))


def static_multiplication(levels: Array, scales: Array, bits: int, block: int, steps: Array, values: Array) -> Call:
    """The same with activations and results rounded by the static scales `steps`, float32 [2]."""
    outputs, inputs = len(levels), levels.shape[1] * 8 // bits
    sizes = outputs, inputs, bits, block, len(values)
    return Call("multiply_static", sizes, (levels, scales, steps, values), (len(values), outputs))


def gguf_multiplication(kind: int, data: NDArray[np.uint8], values: Array) -> Call:
    """Weights [outputs, bytes of a row] of a type of GGUF files by values [rows, inputs]."""
    sizes = kind, len(data), values.shape[1], data.shape[1], len(values)
    return Call("multiply_gguf", sizes, (data, values), (len(values), len(data)))


def float_multiplication(weights: Array, values: Array) -> Call:
    """Weights [outputs, inputs] in float32, float16, or bfloat16 as uint16, by values [rows, inputs]."""
    kind = [np.float32, np.float16, np.uint16].index(weights.dtype.type)
    return Call("multiply_floats", (kind, *weights.shape, len(values)), (weights, values), (len(values), len(weights)))


def gguf_weights(random: np.random.Generator, kind: int, outputs: int, inputs: int) -> NDArray[np.uint8]:
    """Random bytes [outputs, bytes of a row], with finite scales."""
    each, size = GGUF_BLOCKS[kind]
    blocks = random.integers(0, 256, (outputs, inputs // each, size)).astype(np.uint8)
    place = HALVES[kind]
    halves = random.standard_normal((*blocks.shape[:2], (place.stop - place.start) // 2)).astype(np.float16)
    blocks[..., place] = halves.view(np.uint8)
    return blocks.reshape(outputs, -1)


def attention(queries: Array, cached: Sequence[Array], fresh: Sequence[Array], heads: int, origin: int, window: int) -> Call:
    """Queries [rows * heads, dim] to cached keys and values [past, dim] and to fresh ones [rows, dim] of one K/V head."""
    sizes = len(cached[0]), len(fresh[0]), heads, queries.shape[1], origin, window, 64
    return Call("attend", sizes, (queries, *cached, *fresh), queries.shape)


def cell_attention(kind: int, queries: Array, keys: Array, values: Array, mask: Array, *, at_once: int = 64) -> Call:
    """Queries [rows * heads, dim] to keys and values [cells, bytes of a row] that float16 masks [rows, cells] admit.

    `kind` is the number of a type of rows in `CELL_BLOCKS`.
    """
    each, size = CELL_BLOCKS[kind]
    dims = [array.shape[1] // size * each for array in (keys, values)]
    rows, cells = mask.shape
    sizes = kind, cells, rows, len(queries) // rows, *dims, at_once
    return Call("attend_cells", sizes, (queries, keys, values, mask), (len(queries), dims[1]))


def gate(gates: Array, values: Array) -> Call:
    """gelu(gates) * values, [count] each."""
    return Call("gate", (len(gates),), (gates, values), gates.shape)


def tanh_of(values: Array) -> Call:
    """tanh(values), [count]."""
    return Call("tanh", (len(values),), (values,), values.shape)


def norm_of(values: Array, weight: Array) -> Call:
    """values / sqrt(mean(values^2) + 1e-6) * weight, [count]."""
    return Call("norm", (len(values),), (values, weight, np.full(1, 1e-6, np.float32)), values.shape)


def cell_rows(kind: int, values: Array) -> NDArray[np.uint8]:
    """Values [rows, dim] as rows of a memory of that type, rounded as llama.cpp does."""
    if kind == 0:
        return values.astype(np.float16).view(np.uint8)
    blocks = values.reshape(len(values), -1, 32)
    maximum = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2)[..., None], axis=2)
    scale = (np.abs(maximum) / 127 if kind == 1 else maximum / -8).astype(np.float16)
    levels = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale != 0).astype(np.float32)
    if kind == 1:
        packed = np.rint(levels).clip(-127, 127).astype(np.int8).view(np.uint8)
    else:
        nibbles = np.rint(levels + 8).clip(0, 15).astype(np.uint8)
        packed = nibbles[..., :16] | nibbles[..., 16:] << 4
    return np.concatenate([scale.view(np.uint8), packed], axis=2).reshape(len(values), -1)


def cell_values(kind: int, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What rows of a memory stand for."""
    if kind == 0:
        return rows.view(np.float16).astype(np.float32)
    blocks = rows.reshape(len(rows), -1, CELL_BLOCKS[kind][1])
    scale, packed = blocks[..., :2].copy().view(np.float16).astype(np.float32), blocks[..., 2:]
    levels = packed.view(np.int8) if kind == 1 else np.concatenate([packed & 15, packed >> 4], axis=2).astype(np.int8) - 8
    return (levels * scale).reshape(len(rows), -1)
