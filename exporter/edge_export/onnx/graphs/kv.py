"""The types of K/V rows: float32, float16, or int8 with one scale for each channel of each head, fixed in the export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.safetensors import read_values
from edge_export.onnx.graph_builder import GraphBuilder
from edge_export.onnx.request import KvKind
from edge_export.onnx.weights import Stored, ValueType, WeightFile
from edge_runtime.bundle.manifest import CacheBuffer, Rotation

KV_TYPES: dict[KvKind, ValueType] = {"f32": "f32", "f16": "f16", "int8": "i8"}
_LEVELS = 127
# Other text has larger values than the text on which scales are measured.
_HEADROOM = 1.25


@dataclass(frozen=True, kw_only=True)
class KvFormat:
    """How rows are stored. `scales`, of int8 only, are those of each owning layer's keys and values, float32 [kv_heads x head_dim]."""

    kind: KvKind
    scales: Mapping[int, tuple[Stored, Stored]] = field(default_factory=dict)

    @property
    def type(self) -> ValueType:
        """The type of the buffers."""
        return KV_TYPES[self.kind]

    def widened(self, graph: GraphBuilder, rows: str, layer: int, part: int) -> str:
        """Converts stored rows [1, 1, n, head_dim] of an owning layer to float32; `part` is 0 for keys, 1 for values."""
        if self.kind == "f32":
            return rows
        if self.kind == "f16":
            return graph.op("Cast", rows, to=1)
        return graph.op("DequantizeLinear", rows, graph.weight(self.scales[layer][part]), axis=3)

    def kept(self, graph: GraphBuilder, rows: str, layer: int, part: int, name: str) -> str:
        """Outputs float32 `rows` [1, 1, n, head_dim] in the stored type under `name`; returns them as they will be read, as float32."""
        if self.kind == "f16":
            graph.op("Cast", rows, name=name, to=10)
        else:
            graph.op("QuantizeLinear", rows, graph.weight(self.scales[layer][part]), name=name, axis=3, output_dtype=3)
        return self.widened(graph, name, layer, part)


FLOAT_ROWS = KvFormat(kind="f32")


def store_kv(kind: KvKind, checkpoint: Checkpoint, weights: WeightFile) -> KvFormat:
    """Returns the rows' format; scales of int8 are the largest that norms allow, until `fit_scales` replaces them."""
    model = checkpoint.architecture
    if kind != "int8":
        return KvFormat(kind=kind)
    scales = {}
    for layer in range(model.owning_layers):
        channels, bound = model.kv_heads_of(layer) * model.head_dim_of(layer), sqrt(model.head_dim_of(layer)) / _LEVELS
        norm = read_values(checkpoint.tensors[f"model.layers.{layer}.self_attn.k_norm.weight"])
        scales[layer] = tuple(
            weights.array(np.full(channels, bound * largest, np.float32), "f32") for largest in (max(float(np.abs(norm).max()), 1e-6), 1.0)
        )
    return KvFormat(kind=kind, scales=scales)  # type: ignore[arg-type]


def fit_scales(
    kv: KvFormat, data: Path, buffers: Sequence[CacheBuffer], rotations: Sequence[Rotation], stored_rows: Mapping[str, NDArray[Any]]
) -> None:
    """Writes fitted scales into the data file: `stored_rows` are int8 [kv_heads, n, head_dim] by buffer, stored with the first scales."""
    turned = {rotation.kind: rotation.rotated_pairs for rotation in rotations}
    with data.open("r+b") as file:
        for buffer in buffers:
            for part, name in enumerate((buffer.key, buffer.value)):
                stored = kv.scales[buffer.layer][part]
                file.seek(stored.offset)
                old = np.frombuffer(file.read(stored.length), np.float32).reshape(buffer.kv_heads, 1, buffer.head_dim)
                rows = stored_rows[name].astype(np.float32) * old
                largest = _amplitudes(rows, turned[buffer.kind]) if part == 0 else np.abs(rows).max(axis=1)
                # Never below one level of the first scales, the resolution of `stored_rows`.
                scales = np.maximum(largest * _HEADROOM, old[:, 0]) / _LEVELS
                file.seek(stored.offset)
                file.write(scales.astype("<f4").tobytes())


def _amplitudes(keys: NDArray[np.float32], pairs: int) -> NDArray[np.float32]:
    """The largest absolute value of each channel of rotated keys [kv_heads, n, head_dim] at any position: [kv_heads, head_dim]."""
    half = keys.shape[2] // 2
    first, second = keys[:, :, :pairs], keys[:, :, half : half + pairs]
    lengths = np.sqrt(first**2 + second**2).max(axis=1)
    largest: NDArray[np.float32] = np.abs(keys).max(axis=1)
    largest[:, :pairs] = largest[:, half : half + pairs] = lengths
    return largest
