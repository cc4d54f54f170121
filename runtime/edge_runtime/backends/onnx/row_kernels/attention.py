"""Attention, as `edge_export.onnx.graphs.attention` writes it, gets operators whose sums for a row depend on nothing else in its batch:
both GroupQueryAttention on float32 buffers, and the nodes of attention on rows together.
"""

from __future__ import annotations

from edge_runtime.backends.onnx.row_kernels.messages import Node, number_of, sources

ATTENTION, WRITER, READER, STOCK_ATTENTION = "AttendRows", "AttendBuffers", "ReadBuffers", "GroupQueryAttention"
# What a GroupQueryAttention may say besides its sizes: no soft cap, no sinks, no rotation of neighbours.
_SIZES, _FIXED = {b"num_heads", b"kv_num_heads", b"local_window_size"}, {b"do_rotary": 1, b"scale": 1.0}


def attention_on_buffers(node: Node) -> Node | None:
    """The operator for a GroupQueryAttention on float32 buffers; float16 rows are cast before it, scales of int8 ones are more inputs."""
    casts = any(source is not None and source.operator == "Cast" for source in node.sources[:3])
    fixed = {name: number for name, number in node.numbers.items() if name not in _SIZES}
    if node.operator != STOCK_ATTENTION or len(node.inputs) != 10 or casts or fixed != _FIXED or len(node.outputs) not in (1, 3):
        return None
    kept = [one for one, (name, _) in zip(node.attributes, map(number_of, node.attributes), strict=True) if name in _SIZES]
    return Node(WRITER if len(node.outputs) == 3 else READER, node.inputs, node.outputs, kept)


def attention_on_rows(end: Node) -> Node | None:
    """The operator for attention on rows, if `end` adds up its two products."""
    cached, new = sources(end, "Add", 2) or (None, None)
    split, _ = sources(cached, "MatMul", 2) or (None, None)
    other, _ = sources(new, "MatMul", 2) or (None, None)
    softmax, sizes = sources(split, "Split", 2, axis=-1) or (None, None)
    (joined,) = sources(softmax, "Softmax", 1, axis=-1) or (None,)
    scores, masked = sources(joined, "Concat", 2, axis=-1) or (None, None)
    own, mask = sources(masked, "Add", 2) or (None, None)
    products = [sources(one, "FusedMatMul", 2, transB=1) for one in (scores, own)]
    if other is not split or cached is None or new is None or split is None or None in products or not _causal(mask):
        return None
    assert scores is not None
    assert own is not None
    (queries, past_keys), (same, new_keys) = scores.inputs, own.inputs
    if same != queries or [cached.inputs[0], new.inputs[0]] != split.outputs or not _lengths(sizes):
        return None
    return Node(ATTENTION, [queries, past_keys, cached.inputs[1], new_keys, new.inputs[1]], end.outputs)


def _causal(mask: Node | None) -> bool:
    """Whether this is the mask of the rows of one forward, made from the order of their positions."""
    (spread,) = sources(mask, "Flatten", 1, axis=2) or (None,)
    where, _ = sources(spread, "Expand", 2) or (None, None)
    seen, _, _ = sources(where, "Where", 3) or (None, None, None)
    rows = sources(seen, "GreaterOrEqual", 2) or (None, None)
    return all(sources(one, "Reshape", 2) is not None and one is not None and one.inputs[0] == b"position_ids" for one in rows)


def _lengths(sizes: Node | None) -> bool:
    """Whether these are two numbers of rows. All layers take those of the first: they have the same rows."""
    return all(sources(one, "Shape", 1, start=2, end=3) is not None for one in sources(sizes, "Concat", 2, axis=0) or (None,))
