"""q4_0 tensors of weights that lie on a grid, written without loss (see checkpoint/published/grid.py); other matrices as q8_0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.published.grid import BLOCK, find_grid, lies_on_grid
from edge_export.checkpoint.safetensors import StoredTensor, read_float_chunks
from edge_export.gguf.loader import gguf
from edge_export.gguf.tensor_names import gguf_name, stays_float32
from edge_runtime.bundle.gguf_types import TENSOR_TYPES

_Q4_0, _Q8_0 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0
# Matrices of a checkpoint that are tried before it counts as trained for q4_0.
_TRIED = 6


@dataclass(frozen=True, kw_only=True)
class ExactReport:
    """What was written: values by tensor, and how many of them came back bit for bit; tensors on no grid, which are q8_0."""

    values: dict[str, int] = field(default_factory=dict)
    equal: dict[str, int] = field(default_factory=dict)
    off_grid: list[str] = field(default_factory=list)

    def sentence(self) -> str:
        """The report in a sentence."""
        total, equal = sum(self.values.values()), sum(self.equal.values())
        blocks = f"{equal / total:.2%} of their blocks bit for bit" if total else "no blocks"
        text = f"{len(self.values)} matrices lie on the grid of q4_0 and are written as such, {blocks}"
        if self.off_grid:
            text += f"; {len(self.off_grid)} do not and are q8_0: {', '.join(self.off_grid[:4])}{', ...' if len(self.off_grid) > 4 else ''}"
        return text + "."


def matrices(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """The tensors that a GGUF quantizes, by their GGUF names."""
    named = {gguf_name(name): tensor for name, tensor in checkpoint.tensors.items()}
    return {name: tensor for name, tensor in named.items() if name is not None and not stays_float32(name, len(tensor.shape))}


def trained_for_q4(checkpoint: Checkpoint) -> bool:
    """Whether most of a few matrices of a checkpoint lie on the grid of q4_0. Raises CheckpointError."""
    named = sorted(matrices(checkpoint).items())
    tried = [tensor for _, tensor in named[:: max(1, len(named) // _TRIED)]][:_TRIED]
    return 2 * sum(lies_on_grid(tensor) for tensor in tried) > len(tried)


def block_type(name: str, tensor: StoredTensor, report: ExactReport) -> Any | None:
    """The ggml type of a matrix; None if its rows are no whole blocks."""
    if tensor.shape[-1] % BLOCK:
        return None
    if lies_on_grid(tensor):
        return _Q4_0
    report.off_grid.append(name)
    return _Q8_0


def block_bytes(shape: tuple[int, ...], kind: Any) -> int:
    """Size of a tensor of this type."""
    return prod(shape) // BLOCK * TENSOR_TYPES[kind].bytes


def block_pieces(name: str, tensor: StoredTensor, kind: Any, report: ExactReport) -> Iterator[Any]:
    """Yields the bytes of a matrix; what came back goes into the report."""
    report.values[name] = report.equal[name] = 0
    if kind != _Q4_0:
        del report.values[name], report.equal[name]
    for chunk in read_float_chunks(tensor, "f32"):
        blocks = chunk.reshape(-1, BLOCK)
        if kind == _Q4_0:
            yield _packed(blocks, name, report).data.cast("B")
        else:
            yield np.ascontiguousarray(gguf.quants.quantize(blocks, kind)).data.cast("B")


def _packed(blocks: NDArray[np.float32], name: str, report: ExactReport) -> NDArray[np.uint8]:
    """Blocks of q4_0 (ggml-common.h, block_q4_0): a float16 scale, then 16 bytes, of value k in the low half and k + 16 in the high."""
    grid = find_grid(blocks, half_scales=True)
    report.values[name] += len(blocks)
    report.equal[name] += int(grid.exact.sum())
    levels = (grid.levels + np.int8(8)).view(np.uint8)
    packed = np.empty((len(blocks), 18), np.uint8)
    packed[:, :2] = grid.scales.astype("<f2")[:, None].view(np.uint8)
    packed[:, 2:] = levels[:, :16] | (levels[:, 16:] << np.uint8(4))
    return packed
