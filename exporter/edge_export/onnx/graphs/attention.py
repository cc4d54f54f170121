"""Attention of graphs with dynamic shapes, in two variants.

On *buffers*: com.microsoft GroupQueryAttention with one buffer per owning layer, bound as past and as present, so that rows are written in
place. Layers without K/V of their own give it no new rows and the owner's buffer.

On *rows*: plain products with exactly the visible rows, for one K/V head: in the target on full layers, in the drafter on all.
All query heads are rows of one product, so that keys are read once; GroupQueryAttention reads them once for each head, which is slow at
long contexts. The target outputs the new rows, and the host binds the memory behind the existing rows for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_export.checkpoint.architecture import FULL, SLIDING, TextArchitecture
from edge_export.onnx.graph_builder import CONTRIB, GraphBuilder
from edge_export.onnx.graphs.kv import KvFormat
from edge_export.onnx.request import reads_rows

LAYER_KINDS = {SLIDING: "sliding", FULL: "full"}


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """Inputs of attention of one kind of layer besides Q, K and V: the number of rows in its buffers, and the table of rotations.

    `last_row` int32 [1] is the index of the newest row, `rows` int32 [] how many there are, `cosine` and `sine` [context, head_dim/2].
    Both counts are empty for attention on rows.
    """

    last_row: str
    rows: str
    cosine: str
    sine: str


@dataclass(frozen=True, kw_only=True)
class CacheNames:
    """The buffers of layer `owner` [1, kv_heads, rows, head_dim], before or after the new rows are written.

    With `on_rows` they are the rows there are, or the new rows alone.
    """

    key: str
    value: str
    owner: int
    on_rows: bool = False


def declare_attention(
    graph: GraphBuilder, model: TextArchitecture, positions: str | int, counted: set[str], kv: KvFormat
) -> dict[str, AttentionInputs]:
    """Declares `position_ids` and, per kind of layer there is, the inputs of its attention; the counts are those of `counted` kinds.

    Layers of these kinds attend to buffers; with float16 rows, they compute in float16, rotations too.
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
    """Declares the buffers of owning layers of the target, or their rows, which are converted to float32."""
    declared = {}
    for layer in layers:
        on_rows = reads_rows(target, layer, drafter=drafter)
        shape = cache_shape(target, layer, f"rows_of_{LAYER_KINDS[target.layer_types[layer]]}" if on_rows else None)
        names = [graph.input(f"{word}.{layer}", kv.type, shape) for word in ("key", "value")]
        key, value = [kv.widened(graph, name, layer, part) for part, name in enumerate(names)] if on_rows else names
        declared[layer] = CacheNames(key=key, value=value, owner=layer, on_rows=on_rows)
    return declared


def counted_kinds(target: TextArchitecture, caches: Mapping[int, CacheNames]) -> set[str]:
    """The kinds of layers that attend to buffers."""
    return {target.layer_types[layer] for layer, names in caches.items() if not names.on_rows}


def cache_shape(model: TextArchitecture, layer: int, rows: str | None) -> tuple[int | str, ...]:
    """The shape of `rows` of an owning layer, or of its complete buffers."""
    return (1, model.kv_heads_of(layer), rows or f"{LAYER_KINDS[model.layer_types[layer]]}_rows", model.head_dim_of(layer))


class ReadRows:
    """The rows of a target's forward that go on behind the last layer with K/V, where nothing else is read: all but the first
    `skipped_rows`, an input int64 [1]. There may be none."""

    def __init__(self, graph: GraphBuilder) -> None:
        self._graph = graph
        self._skipped = graph.input("skipped_rows", "i64", (1,))
        self._made: dict[str, str] = {}

    @property
    def positions(self) -> str:
        """Their positions int64 [1, n]."""
        return self._once("positions", lambda: self.of("position_ids"))

    def of(self, value: str) -> str:
        """These rows of value [1, T, width]."""
        return self._behind(value, self._skipped)

    def attended(self, query: str, width: int, attention: Callable[[str, str], str]) -> str:
        """Attention of query [1, n, width] and their positions by an operator that takes at least one row."""
        graph = self._graph
        none = self._once(f"none_{width}", lambda: self._if_none(graph.floats(np.zeros((1, 1, width), np.float32))))
        positions = self._once("padded", lambda: graph.op("Concat", self._if_none(self._newest()), self.positions, axis=1))
        rows = attention(graph.op("Concat", none, query, axis=1), positions)
        return self._behind(rows, self._once("padding", lambda: graph.op("Shape", none, start=1, end=2)))

    def _newest(self) -> str:
        return self._behind("position_ids", self._graph.integers([-1]))

    def _if_none(self, row: str) -> str:
        """A row [1, 1, ...] if no row is read, else none."""
        return self._behind(row, self._once("count", lambda: self._graph.op("Shape", self.positions, start=1, end=2)))

    def _behind(self, value: str, start: str) -> str:
        return self._graph.op("Slice", value, start, self._graph.integers([np.iinfo(np.int64).max]), self._graph.integers([1]))

    def _once(self, key: str, make: Callable[[], str]) -> str:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class Attention:
    """Emits attention of one model's layers. Takes normed queries [1, T, heads x head_dim], keys and values [1, T, kv_heads x head_dim]."""

    def __init__(self, graph: GraphBuilder, model: TextArchitecture, inputs: dict[str, AttentionInputs], kv: KvFormat) -> None:
        self._graph = graph
        self._model = model
        self._inputs = inputs
        self._kv = kv
        self._made: dict[str, str] = {}
        self._own: dict[str, CacheNames] = {}
        # The names of buffers in layers that only read them; see on_buffers.
        self.again: dict[str, int] = {}
        # The rows whose queries come now; None for all.
        self.read: ReadRows | None = None

    @property
    def _positions(self) -> str:
        """The positions of the queries."""
        return self.read.positions if self.read else "position_ids"

    def on_buffers(
        self, query: str, new: tuple[str, str] | None, layer: int, cache: CacheNames, present: CacheNames | None, window: int
    ) -> str:
        """Attention to the buffers of the layer `cache.owner`. `new` keys and values, if any, are written into them first; the buffers
        are then named `present`."""
        model, heads = self._model, self._model.heads
        if self.read is None:
            return self._grouped((query, heads, "position_ids"), new, layer, (cache, present), window)
        if new is not None:
            assert present is not None
            # The operator writes as many rows as it has queries: here keys, which attend to themselves.
            self._grouped((new[0], model.kv_heads_of(layer), "position_ids"), new, layer, (cache, present), 1)
            cache = present

        def attention(rows: str, positions: str) -> str:
            return self._grouped((rows, heads, positions), None, layer, (cache, None), window)

        return self.read.attended(query, heads * model.head_dim_of(layer), attention)

    def _grouped(
        self,
        queries: tuple[str, int, str],
        new: tuple[str, str] | None,
        layer: int,
        caches: tuple[CacheNames, CacheNames | None],
        window: int,
    ) -> str:
        """A GroupQueryAttention of queries, so many heads of them, and their positions; `caches` before it and behind it, with new rows."""
        graph, model, kv, (query, heads, positions), (cache, present) = self._graph, self._model, self._kv, queries, caches
        inputs, kv_heads = self._inputs[model.layer_types[layer]], model.kv_heads_of(layer)
        key, value = new or (graph.floats(np.empty((1, 0, kv_heads * model.head_dim_of(layer)), np.float32)),) * 2
        rows = [query, key, value]
        if kv.kind == "f16":
            rows = [graph.op("Cast", part, to=10) for part in rows]
        attended, outputs = graph.fresh("attended"), [present.key, present.value] if present else []
        extra: dict[str, Any] = {}
        scales: list[str] = []
        if kv.kind == "int8":
            extra = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
            shape = (1, kv_heads, 1, model.head_dim_of(layer))
            scales = ["", "", *(graph.weight(stored.shaped(*shape)) for stored in kv.scales[cache.owner])]
            if not outputs:
                # The kernel requires them, even where nothing is written.
                outputs = [f"present_{word}.{cache.owner}@{layer}" for word in ("key", "value")]
                self.again |= dict.fromkeys(outputs, cache.owner)
        graph.ops(
            "GroupQueryAttention",
            [*rows, cache.key, cache.value, inputs.last_row, inputs.rows, inputs.cosine, inputs.sine, positions, *scales],
            [attended, *outputs],
            domain=CONTRIB,
            num_heads=heads,
            kv_num_heads=kv_heads,
            scale=1.0,
            local_window_size=window,
            do_rotary=1,
            **extra,
        )
        return graph.op("Cast", attended, to=1) if kv.kind == "f16" else attended

    def keep(self, new: tuple[str, str], layer: int, present: CacheNames) -> None:
        """Outputs a layer's own keys and values as the new rows `present`."""
        named = self._kv.kind == "f32"
        rows = (
            self._turned(new[0], layer, 1, "position_ids", name=present.key if named else None),
            self._as_rows(new[1], layer, present.value if named else None),
        )
        if not named:
            key, value = (
                self._kv.kept(self._graph, row, layer, part, name)
                for part, (row, name) in enumerate(zip(rows, (present.key, present.value), strict=True))
            )
            self._own[present.key] = CacheNames(key=key, value=value, owner=layer, on_rows=True)

    def _turned(self, value: str, layer: int, heads: int, positions: str, *, name: str | None = None) -> str:
        """Rotary embedding of [1, T, heads x head_dim]; returns [1, 1, T x heads, head_dim]."""
        graph, model = self._graph, self._model
        inputs = self._inputs[model.layer_types[layer]]
        turned = graph.op("RotaryEmbedding", value, positions, inputs.cosine, inputs.sine, domain=CONTRIB, num_heads=heads)
        return graph.op("Reshape", turned, graph.integers([1, 1, -1, model.head_dim_of(layer)]), name=name)

    def _as_rows(self, value: str, layer: int, name: str | None) -> str:
        """[1, T, head_dim] as [1, 1, T, head_dim]."""
        return self._graph.op("Reshape", value, self._graph.integers([1, 1, -1, self._model.head_dim_of(layer)]), name=name)

    def on_rows(self, query: str, layer: int, past: CacheNames, new: CacheNames | None) -> str:
        """Attention to the rows of `past`, and to those of `new` up to each query's own position."""
        graph, model = self._graph, self._model
        turned = self._turned(query, layer, model.heads, self._positions)
        scores = graph.op("FusedMatMul", turned, past.key, domain=CONTRIB, transB=1)
        if new is None:
            attended = graph.op("MatMul", graph.op("Softmax", scores, axis=-1), past.value)
        else:
            new = self._own.get(new.key, new)
            own = graph.op("Add", graph.op("FusedMatMul", turned, new.key, domain=CONTRIB, transB=1), self._causal())
            shares = graph.op("Softmax", graph.op("Concat", scores, own, axis=-1), axis=-1)
            before, behind = graph.ops("Split", [shares, self._sizes(past, new)], 2, axis=-1)
            attended = graph.op("Add", graph.op("MatMul", before, past.value), graph.op("MatMul", behind, new.value))
        return graph.op("Reshape", attended, graph.integers([1, -1, model.heads * model.head_dim_of(layer)]))

    def _causal(self) -> str:
        """The causal mask to add to the scores [1, 1, n x heads, T] of queries to a forward's own rows."""
        positions = self._positions
        if positions not in self._made:
            graph, heads = self._graph, self._model.heads
            queries = graph.op("Reshape", positions, graph.integers([-1, 1, 1]))
            visible = graph.op("GreaterOrEqual", queries, graph.op("Reshape", "position_ids", graph.integers([1, 1, -1])))
            mask = graph.op("Where", visible, graph.floats(0.0), graph.floats(float(np.finfo(np.float32).min)))
            apart = graph.op("Expand", mask, graph.integers([1, heads, 1]))
            self._made[positions] = graph.op("Flatten", apart, axis=2)
        return self._made[positions]

    def _sizes(self, past: CacheNames, new: CacheNames) -> str:
        """How many rows come from the cache and from the forward itself; the same for all full layers."""
        if "sizes" not in self._made:
            graph = self._graph
            counts = [graph.op("Shape", names.key, start=2, end=3) for names in (past, new)]
            self._made["sizes"] = graph.op("Concat", *counts, axis=0)
        return self._made["sizes"]
