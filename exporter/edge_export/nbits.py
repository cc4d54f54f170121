"""Block quantization of matrices, laid out as com.microsoft MatMulNBits takes them (onnxruntime, docs/ContribOperators.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """How a matrix is rounded: `bits` per weight, and one scale for each `block` neighbouring weights of a row."""

    bits: Literal[4, 8]
    block: Literal[32, 64, 128]
    method: str = "rtn"


@dataclass(frozen=True, kw_only=True)
class PackedMatrix:
    """A rounded matrix [N, K]: `packed` uint8 [N, K/block, block*bits/8], the low nibble first; `scales` float32 [N, K/block].

    `zero_points` uint8 [N, ceil(K/block*bits/8)]; None: all 2^(bits-1).
    """

    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8] | None


def quantize_matrix(weight: NDArray[np.float32], spec: WeightSpec, importance: NDArray[np.float32] | None) -> PackedMatrix:
    """Rounds `weight` [N, K] to the nearest of 2^bits steps around zero; `importance` [K] is not used by this method.

    The largest value of a block, with its sign, falls on the outermost step -2^(bits-1), the only one without a mirror image: so
    all steps are used. K is a multiple of the block.
    """
    del importance
    rows, columns = weight.shape
    half = 1 << (spec.bits - 1)
    blocks = weight.reshape(rows, columns // spec.block, spec.block)
    outermost = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2, keepdims=True), axis=2)
    scales = outermost / np.float32(-half)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    steps = (np.clip(np.rint(blocks * inverse), -half, half - 1) + half).astype(np.uint8)
    if spec.bits == 4:
        steps = steps[:, :, 0::2] | (steps[:, :, 1::2] << np.uint8(4))
    return PackedMatrix(packed=steps, scales=scales[:, :, 0].astype(np.float32), zero_points=None)
