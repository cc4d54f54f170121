"""Importance of each input channel of a model's matrices: the mean square of the channel's values on some text.

The square of a quantization error in column j of a matrix is multiplied by the square of input j, as in llama.cpp's importance matrix.
Tensors have their GGUF names, in files of llama.cpp and in our own calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.architecture import TextArchitecture
from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.published.grid import lies_on_grid
from edge_export.checkpoint.safetensors import StoredTensor
from edge_export.errors import ExportError
from edge_export.gguf.tensor_names import gguf_name, stays_float32
from edge_export.quantization.compensation import Factor
from edge_export.quantization.moments import SecondMoments
from edge_runtime.bundle.manifest import ImportanceSource

# Least importance, beside a mean of 1: channels that the text never used must keep sensible weights too.
MIN_IMPORTANCE = 1e-6
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class ChannelSums:
    """Squares of a matrix's inputs, summed over `counts` rows.

    `sums` float64: the channels of all experts one after another; `counts`: one for each expert, or one for all.
    """

    sums: NDArray[np.float64]
    counts: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Weighing:
    """How the errors of one matrix count: by the importance [K] of its input channels, and compensated by their factored moments."""

    channels: NDArray[np.float32] | None = None
    factor: Factor | None = None


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Importance of one model's input channels: by GGUF tensor name float32 [matrices, K], one matrix or one per expert; all above 0.

    `moments` are there after a calibration, as far as the quantization asked for uses them.
    """

    source: ImportanceSource
    values: dict[str, NDArray[np.float32]]
    moments: SecondMoments | None = None

    def of(self, name: str) -> NDArray[np.float32] | None:
        """Importance [matrices, K] of the tensor with this checkpoint name (model.layers.0...), None if there is none."""
        return self.values.get(gguf_name(name) or "")

    def factor(self, name: str, tensor: StoredTensor) -> Factor | None:
        """The factored second moments of this tensor's inputs, by its checkpoint name; None if there are none, or its weights lie on a
        grid already, which quantization has to keep."""
        short = gguf_name(name)
        if self.moments is None or short is None or not self.moments.has(short) or lies_on_grid(tensor):
            return None
        return self.moments.factor(short)


def fitted(entries: Mapping[str, ChannelSums], checkpoint: Checkpoint, source: ImportanceSource) -> Importance:
    """Brings the entries of a file or a calibration into the shape of the checkpoint's tensors.

    Raises ExportError, naming the tensor, for one that the model does not have, of another size, or with values that are not mean
    squares, or if a matrix of the model's blocks is missing.
    """
    tensors = {gguf_name(name): tensor for name, tensor in checkpoint.tensors.items()}
    values: dict[str, NDArray[np.float32]] = {}
    for name, entry in entries.items():
        tensor = tensors.get(name)
        if tensor is None or len(tensor.shape) < 2:
            raise ExportError(
                f"{source.name} has importance for {name}, which {checkpoint.folder} does not have; give the file of this model"
            )
        values[name] = _means(name, entry, tensor, source)
    lacking = [name for name in _block_matrices(checkpoint) if name not in values]
    if lacking:
        more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
        raise ExportError(
            f"{source.name} has no importance for {', '.join(lacking[:_NAMED])}{more} of {checkpoint.folder};"
            " give the file of exactly this model, made from text that uses all of it"
        )
    return Importance(source=source, values=values)


def _block_matrices(checkpoint: Checkpoint) -> list[str]:
    """GGUF names of the matrices in the model's blocks that are multiplied with and quantized."""
    names = []
    for name, tensor in checkpoint.tensors.items():
        short = gguf_name(name)
        if short is None or not short.startswith("blk.") or stays_float32(short, len(tensor.shape)):
            continue
        if not _unused(short, checkpoint.architecture):
            names.append(short)
    return names


def _unused(name: str, model: TextArchitecture) -> bool:
    """Whether it is a K or V matrix of a layer that shares another's rows."""
    _, layer, matrix = name.split(".", 2)
    return int(layer) >= model.owning_layers and matrix in ("attn_k.weight", "attn_v.weight")


def _means(name: str, entry: ChannelSums, tensor: StoredTensor, source: ImportanceSource) -> NDArray[np.float32]:
    matrices, width = prod(tensor.shape[:-2]), tensor.shape[-1]
    if entry.sums.size != matrices * width or entry.counts.size not in (1, matrices):
        raise ExportError(
            f"{source.name} has {entry.sums.size} values for {name}, its shape {list(tensor.shape)} asks for {matrices * width};"
            " give the importance of this model"
        )
    if not (np.isfinite(entry.sums).all() and np.isfinite(entry.counts).all()) or (entry.sums < 0).any() or (entry.counts < 0).any():
        raise ExportError(f"{source.name} has values for {name} that are negative or not finite; make the file again")
    counts = np.broadcast_to(entry.counts.reshape(-1, 1), (matrices, 1))
    means = entry.sums.reshape(matrices, width) / np.maximum(counts, 1)
    floor = MIN_IMPORTANCE * means.mean(axis=1, keepdims=True)
    # The channels of an expert without input, or with only zeros, are all alike.
    with np.errstate(over="ignore"):
        result = np.where((counts > 0) & (floor > np.finfo(np.float32).tiny), np.maximum(means, floor), 1.0).astype(np.float32)
    if not np.isfinite(result).all():
        raise ExportError(f"{source.name} has values for {name} beyond float32; make the file again")
    return result
