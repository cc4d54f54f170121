"""Attention in graphs with dynamic shapes, in two variants, and the types of K/V rows.

On *buffers*: com.microsoft GroupQueryAttention with one buffer per owning layer. The buffer is bound both as past and as present, so new
rows are written in place. A layer without K/V of its own passes no new rows and reads the owner's buffer.

On *rows*: plain products with exactly the visible rows, for a single K/V head; in the target on full layers, in the drafter on all. All
query heads are rows of one product, so keys are read only once. GroupQueryAttention reads them once for each head, which is slow at long
contexts. The graph outputs the new rows, and the host binds the memory after the existing rows as that output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.architecture import FULL, SLIDING, TextArchitecture
from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.safetensors import read_values
from edge_export.onnx.graph_builder import Body, GraphBuilder
from edge_export.onnx.request import KvKind, reads_rows
from edge_export.onnx.weights import Stored, ValueType, WeightFile
from edge_runtime.bundle.manifest import CacheBuffer, Rotation
from edge_runtime.bundle.onnx_graph import CONTRIB

# int8 rows have one scale for each channel of each head. Scales are fixed at export.
KV_TYPES: dict[KvKind, ValueType] = {"f32": "f32", "f16": "f16", "int8": "i8"}
_LEVELS = 127
# The factor by which scales are increased, because other text may have larger values than the text on which they are measured.
_HEADROOM = 1.25


@dataclass(frozen=True, kw_only=True)
class KvFormat:
    """How K/V rows are stored. For int8, `scales` holds those of each owning layer's keys and values, float32 [kv_heads x head_dim]."""

    kind: KvKind
    scales: Mapping[int, tuple[Stored, Stored]] = field(default_factory=dict)

    @property
    def type(self) -> ValueType:
        """The type of the buffers."""
        return KV_TYPES[self.kind]

    def to_float32(self, graph: GraphBuilder, rows: str, layer: int, part: int) -> str:
        """Converts stored rows [1, 1, n, head_dim] of an owning layer to float32; `part` is 0 for keys, 1 for values."""
        if self.kind == "f32":
            return rows
        if self.kind == "f16":
            return graph.op("Cast", rows, to=1)
        return graph.op("DequantizeLinear", rows, graph.weight(self.scales[layer][part]), axis=3)

    def to_stored(self, graph: GraphBuilder, rows: str, layer: int, part: int, name: str) -> str:
        """Converts float32 `rows` [1, 1, n, head_dim] to the stored type as `name`. Returns them converted back, as they will be read."""
        if self.kind == "f16":
            graph.op("Cast", rows, name=name, to=10)
        else:
            graph.op("QuantizeLinear", rows, graph.weight(self.scales[layer][part]), name=name, axis=3, output_dtype=3)
        return self.to_float32(graph, name, layer, part)


FLOAT_ROWS = KvFormat(kind="f32")


def store_kv(kind: KvKind, checkpoint: Checkpoint, weights: WeightFile) -> KvFormat:
    """Returns the format of K/V rows. The scales of int8 are the largest that the norms allow, until `fit_scales` replaces them."""
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
    """Writes fitted scales into the data file.

    `stored_rows` holds int8 rows [kv_heads, n, head_dim] by buffer name. They were stored with the first scales, which the file has now.
    """
    rotated_pairs = {rotation.kind: rotation.rotated_pairs for rotation in rotations}
    with data.open("r+b") as file:
        for buffer in buffers:
            for part, name in enumerate((buffer.key, buffer.value)):
                stored = kv.scales[buffer.layer][part]
                file.seek(stored.offset)
                old = np.frombuffer(file.read(stored.length), np.float32).reshape(buffer.kv_heads, 1, buffer.head_dim)
                rows = stored_rows[name].astype(np.float32) * old
                largest = _amplitudes(rows, rotated_pairs[buffer.kind]) if part == 0 else np.abs(rows).max(axis=1)
                # `stored_rows` have the resolution of the first scales, so an amplitude below one of their levels cannot be trusted.
                scales = np.maximum(largest * _HEADROOM, old[:, 0]) / _LEVELS
                file.seek(stored.offset)
                file.write(scales.astype("<f4").tobytes())


def _amplitudes(keys: NDArray[np.float32], pairs: int) -> NDArray[np.float32]:
    """Returns the largest absolute value of each channel [kv_heads, head_dim] of keys [kv_heads, n, head_dim] rotated to any position."""
    half = keys.shape[2] // 2
    first, second = keys[:, :, :pairs], keys[:, :, half : half + pairs]
    lengths = np.sqrt(first**2 + second**2).max(axis=1)
    largest: NDArray[np.float32] = np.abs(keys).max(axis=1)
    largest[:, :pairs] = largest[:, half : half + pairs] = lengths
    return largest


LAYER_KINDS = {SLIDING: "sliding", FULL: "full"}


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """Names of the inputs that attention of one kind of layer has besides Q, K and V: counts of rows, and tables of rotations.

    `last_row` int32 [1] is the index of the newest row in the buffers, `rows` int32 [] the number of rows. Both are "" for attention on
    rows. `cosine` and `sine` are [context, head_dim/2].
    """

    last_row: str
    rows: str
    cosine: str
    sine: str


@dataclass(frozen=True, kw_only=True)
class CacheNames:
    """Names of the K/V buffers of layer `owner` [1, kv_heads, rows, head_dim], before or after new rows are written.

    With `on_rows`, they are not buffers but the existing rows, or only the new rows.
    """

    key: str
    value: str
    owner: int
    on_rows: bool = False


def declare_attention(
    graph: GraphBuilder, model: TextArchitecture, positions: str | int, counted: set[str], kv: KvFormat
) -> dict[str, AttentionInputs]:
    """Declares `position_ids`, and the inputs of attention for each kind of layer that the model has.

    Layers of `counted` kinds attend to buffers, so they have inputs for counts. With float16 rows, they compute in float16, rotations
    included.
    """
    graph.input("position_ids", "i64", (1, positions))
    declared = {}
    for kind, word in LAYER_KINDS.items():
        if kind not in model.layer_types:
            continue
        table = ("context", model.head_dim_of(model.layer_types.index(kind)) // 2)
        halved = kind in counted and kv.kind == "f16"
        type_, ending = ("f16", f"{word}_f16") if halved else ("f32", word)
        declared[kind] = AttentionInputs(
            last_row=graph.input(f"last_row_{word}", "i32", (1,)) if kind in counted else "",
            rows=graph.input(f"rows_{word}", "i32", ()) if kind in counted else "",
            cosine=graph.input(f"cosine_{ending}", type_, table),
            sine=graph.input(f"sine_{ending}", type_, table),
        )
    return declared


def declare_caches(
    graph: GraphBuilder, target: TextArchitecture, layers: Iterable[int], kv: KvFormat, *, drafter: bool = False
) -> dict[int, CacheNames]:
    """Declares the buffers of owning layers of the target; where attention is on rows, their rows, which it converts to float32."""
    declared = {}
    for layer in layers:
        on_rows = reads_rows(target, layer, drafter=drafter)
        shape = cache_shape(target, layer, f"rows_of_{LAYER_KINDS[target.layer_types[layer]]}" if on_rows else None)
        names = [graph.input(f"{word}.{layer}", kv.type, shape) for word in ("key", "value")]
        key, value = [kv.to_float32(graph, name, layer, part) for part, name in enumerate(names)] if on_rows else names
        declared[layer] = CacheNames(key=key, value=value, owner=layer, on_rows=on_rows)
    return declared


def counted_kinds(target: TextArchitecture, caches: Mapping[int, CacheNames]) -> set[str]:
    """Returns the kinds of layers that attend to buffers."""
    return {target.layer_types[layer] for layer, names in caches.items() if not names.on_rows}


def cache_shape(model: TextArchitecture, layer: int, rows: str | None) -> tuple[int | str, ...]:
    """Returns the shape of an owning layer's K/V. `rows` names the dimension of rows; None stands for complete buffers."""
    return (1, model.kv_heads_of(layer), rows or f"{LAYER_KINDS[model.layer_types[layer]]}_rows", model.head_dim_of(layer))


class ReadRows:
    """The rows of a target's forward whose hidden rows are needed after the last layer with its own K/V.

    They are all but the first `skipped_rows`, an input int64 [1]. There may be none.
    """

    def __init__(self, graph: GraphBuilder) -> None:
        self._graph = graph
        self._skipped = graph.input("skipped_rows", "i64", (1,))

    @cached_property
    def positions(self) -> str:
        """The positions of these rows, int64 [1, n]."""
        return self.of("position_ids")

    def of(self, value: str) -> str:
        """Selects these rows of value [1, T, width]."""
        return rows_behind(self._graph, value, self._skipped)


def rows_behind(graph: GraphBuilder, value: str, start: str, *, name: str | None = None) -> str:
    """Selects the rows of value [1, n, ...] from `start` int64 [1] on."""
    return graph.op("Slice", value, start, graph.integers([np.iinfo(np.int64).max]), graph.integers([1]), name=name)


class Attention:
    """Emits attention for one model's layers. Queries [1, T, heads x head_dim], keys and values [1, T, kv_heads x head_dim] are normed."""

    def __init__(self, graph: GraphBuilder, model: TextArchitecture, inputs: dict[str, AttentionInputs], kv: KvFormat) -> None:
        self._graph = graph
        self._model = model
        self._inputs = inputs
        self._kv = kv
        self._own: dict[str, CacheNames] = {}
        # The outputs of layers that only read a buffer, and its owner; the operator requires them for int8 (see _grouped).
        self.unused_outputs: dict[str, int] = {}
        # The rows that the current layer's queries are for; None for all rows.
        self.read: ReadRows | None = None

    @property
    def _positions(self) -> str:
        return self.read.positions if self.read else "position_ids"

    def on_buffers(
        self, query: str, new: tuple[str, str] | None, layer: int, cache: CacheNames, present: CacheNames | None, window: int
    ) -> str:
        """Attention to the buffers of the layer `cache.owner`.

        `new` keys and values, if any, are written into the buffers first. The buffers are then named `present`.
        """
        if self.read is not None and new is not None:
            assert present is not None
            # The operator writes as many rows as it has queries, but here there are fewer queries than new rows. So a first call passes the
            # keys as queries, to write all rows; its attention is not used.
            self._grouped((new[0], self._model.kv_heads_of(layer), "position_ids"), new, layer, (cache, present), 1)
            cache, new, present = present, None, None
        return self._grouped((query, self._model.heads, self._positions), new, layer, (cache, present), window)

    def _grouped(
        self,
        queries: tuple[str, int, str],
        new: tuple[str, str] | None,
        layer: int,
        caches: tuple[CacheNames, CacheNames | None],
        window: int,
    ) -> str:
        """Emits a GroupQueryAttention.

        `queries` holds the queries, their number of heads and their positions; `caches` the buffers before the new rows are written, and
        after."""
        graph, model, kv, (query, heads, positions), (cache, present) = self._graph, self._model, self._kv, queries, caches
        inputs, kv_heads, head_dim = self._inputs[model.layer_types[layer]], model.kv_heads_of(layer), model.head_dim_of(layer)
        key, value = new or (graph.floats(np.empty((1, 0, kv_heads * head_dim), np.float32)),) * 2
        attended, outputs = graph.fresh("attended"), [present.key, present.value] if present else []
        sizes, extra = {"num_heads": heads, "kv_num_heads": kv_heads, "local_window_size": window}, dict[str, Any]()
        scales: list[str] = []
        if kv.kind == "int8":
            extra = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
            scales = ["", "", *(graph.weight(stored.shaped(1, kv_heads, 1, head_dim)) for stored in kv.scales[cache.owner])]
            if not outputs:
                # The operator requires these outputs even if nothing is written.
                outputs = [f"present_{word}.{cache.owner}@{layer}" for word in ("key", "value")]
                self.unused_outputs |= dict.fromkeys(outputs, cache.owner)
        rows, buffers = [query, key, value], [cache.key, cache.value, inputs.last_row, inputs.rows, inputs.cosine, inputs.sine]
        # The project's kernels support only float32 rows.
        kind = None if kv.kind != "f32" else "AttendBuffers" if new else "ReadBuffers"
        may_have_none = self.read is not None and new is None
        zeros = [graph.floats(np.zeros((1, 1, heads * head_dim), np.float32))] * may_have_none
        named = graph.kernel(kind, [*rows, *buffers, positions, *scales, *zeros], [attended, *outputs], **sizes)
        with named as body, _padded(body) if may_have_none else nullcontext(body) as stock:
            given, result, halved = stock.inputs[:3], stock.outputs[0], kv.kind == "f16"
            if halved:
                given, result = [stock.graph.op("Cast", part, to=10) for part in given], stock.graph.fresh("attended")
            inner, facts = [*given, *stock.inputs[3:]], {"scale": 1.0, "do_rotary": 1, **sizes, **extra}
            stock.graph.ops("GroupQueryAttention", inner, [result, *stock.outputs[1:]], domain=CONTRIB, **facts)
            if halved:
                stock.graph.op("Cast", result, to=1, name=stock.outputs[0])
        return attended

    def keep(self, new: tuple[str, str], layer: int, present: CacheNames) -> None:
        """Emits a layer's own keys and values as the new rows `present`."""
        named = self._kv.kind == "f32"
        rows = (
            self._rotated(new[0], layer, 1, "position_ids", name=present.key if named else None),
            self._as_rows(new[1], layer, present.value if named else None),
        )
        if not named:
            key, value = (
                self._kv.to_stored(self._graph, row, layer, part, name)
                for part, (row, name) in enumerate(zip(rows, (present.key, present.value), strict=True))
            )
            self._own[present.key] = CacheNames(key=key, value=value, owner=layer, on_rows=True)

    def _rotated(self, value: str, layer: int, heads: int, positions: str, *, name: str | None = None) -> str:
        """Applies the rotary embedding to [1, T, heads x head_dim]; returns [1, 1, T x heads, head_dim]."""
        graph, model = self._graph, self._model
        inputs = self._inputs[model.layer_types[layer]]
        rotated = graph.op("RotaryEmbedding", value, positions, inputs.cosine, inputs.sine, domain=CONTRIB, num_heads=heads)
        return graph.op("Reshape", rotated, graph.integers([1, 1, -1, model.head_dim_of(layer)]), name=name)

    def _as_rows(self, value: str, layer: int, name: str | None) -> str:
        """Reshapes [1, T, head_dim] to [1, 1, T, head_dim]."""
        return self._graph.op("Reshape", value, self._graph.integers([1, 1, -1, self._model.head_dim_of(layer)]), name=name)

    def on_rows(self, query: str, layer: int, past: CacheNames, new: CacheNames | None) -> str:
        """Attention to all rows of `past`, and to the rows of `new` up to each query's position."""
        graph, model = self._graph, self._model
        rotated = self._rotated(query, layer, model.heads, self._positions)
        if new is None:
            scores = graph.op("FusedMatMul", rotated, past.key, domain=CONTRIB, transB=1)
            attended = graph.op("MatMul", graph.op("Softmax", scores, axis=-1), past.value)
        else:
            new, attended = self._own.get(new.key, new), graph.fresh("attended")
            inputs = [rotated, past.key, past.value, new.key, new.value, self._positions, "position_ids"]
            with graph.kernel("AttendRows", inputs, [attended], num_heads=model.heads) as body:
                _attend_rows(body, model.heads)
        return graph.op("Reshape", attended, graph.integers([1, -1, model.heads * model.head_dim_of(layer)]))


@contextmanager
def _padded(body: Body) -> Iterator[Body]:
    """Yields inputs and outputs for an attention operator that needs at least one query.

    Where there is no query, the last input, a row of zeros, is one; its result is removed again. The kernels accept zero queries, so they
    ignore that input.
    """
    graph, (query, *others), (positions, *scales, zeros) = body.graph, body.inputs[:9], body.inputs[9:]
    none = graph.op("Shape", positions, start=1, end=2)
    row = rows_behind(graph, zeros, none)
    place = rows_behind(graph, graph.integers(np.zeros((1, 1), np.int64)), none)
    query, positions = (graph.op("Concat", *parts, axis=1) for parts in ((row, query), (place, positions)))
    attended = graph.fresh("padded")
    yield Body(graph, [query, *others, positions, *scales], [attended, *body.outputs[1:]])
    rows_behind(graph, attended, graph.op("Shape", row, start=1, end=2), name=body.outputs[0])


def _attend_rows(body: Body, heads: int) -> None:
    """Attention of queries [1, 1, n x heads, head_dim] to all past rows, and to the forward's own rows up to each query's position."""
    graph, (queries, past_keys, past_values, keys, values, own_positions, positions) = body.graph, body.inputs
    visible = graph.op(
        "GreaterOrEqual",
        graph.op("Reshape", own_positions, graph.integers([-1, 1, 1])),
        graph.op("Reshape", positions, graph.integers([1, 1, -1])),
    )
    mask = graph.op("Where", visible, graph.floats(0.0), graph.floats(float(np.finfo(np.float32).min)))
    mask = graph.op("Flatten", graph.op("Expand", mask, graph.integers([1, heads, 1])), axis=2)
    scores = graph.op("FusedMatMul", queries, past_keys, domain=CONTRIB, transB=1)
    own = graph.op("Add", graph.op("FusedMatMul", queries, keys, domain=CONTRIB, transB=1), mask)
    shares = graph.op("Softmax", graph.op("Concat", scores, own, axis=-1), axis=-1)
    counts = graph.op("Concat", *(graph.op("Shape", rows, start=2, end=3) for rows in (past_keys, keys)), axis=0)
    before, behind = graph.ops("Split", [shares, counts], 2, axis=-1)
    graph.op("Add", graph.op("MatMul", before, past_values), graph.op("MatMul", behind, values), name=body.outputs[0])
