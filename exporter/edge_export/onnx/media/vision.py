"""The vision tower as an ONNX graph. Math: transformers, models/gemma4/modeling_gemma4.py.

Patches come in groups of nine, those of one soft row, so that pooling is a mean over neighbours; attention knows no order.
"""

from __future__ import annotations

import math

import numpy as np

from edge_export.checkpoint.media_architecture import EMBED_VISION, VisionTower
from edge_export.onnx.graph_builder import GraphBuilder
from edge_export.onnx.media.tower import Tower
from edge_runtime.bundle.onnx_graph import CONTRIB

_PIXELS, _GROUP = 768, 9
_ROPE_BASE = 100.0


def build_vision(tower: Tower, vision: VisionTower, text_size: int) -> None:
    """Adds the tower from `patches` [1, n, 768], values in [0, 1], at `x` [n] and `y` [n], to `rows` [1, n / 9, hidden size]."""
    graph = tower.graph
    patches = graph.input("patches", "f32", (1, "patches", _PIXELS))
    x, y = graph.input("x", "i64", ("patches",)), graph.input("y", "i64", ("patches",))
    scaled = graph.op("Mul", graph.op("Sub", patches, graph.floats(0.5)), graph.floats(2.0))
    table = tower.values("patch_embedder.position_embedding_table")
    embedded = graph.op("Add", *(graph.op("Gather", tower.stored(part), index, axis=0) for part, index in zip(table, (x, y), strict=True)))
    value = graph.op("Add", tower.linear(scaled, "patch_embedder.input_proj.weight"), embedded)
    turns = _turns(tower, vision, x, y)
    for layer in range(vision.layers):
        value = _layer(tower, vision, value, f"encoder.layers.{layer}.", turns)
    size = vision.hidden_size
    pooled = graph.op("ReduceMean", tower.shaped(value, (1, -1, _GROUP, size)), graph.integers([2]), keepdims=0)
    pooled = graph.op("Mul", pooled, graph.floats(math.sqrt(size)))
    rows = tower.linear(tower.plain_norm(pooled, size), EMBED_VISION, outer=True)
    graph.output(graph.op("Identity", rows, name="rows"), "f32", (1, "rows", text_size))


def _turns(tower: Tower, vision: VisionTower, x: str, y: str) -> tuple[str, str]:
    """Cosines and signed sines [1, n, 1, head size]: the first half of a head turns by x, the second by y."""
    graph, pairs = tower.graph, vision.hidden_size // vision.heads // 4
    # In float32, as transformers.
    exponents = np.arange(0, 2 * pairs, 2, dtype=np.float32) / np.float32(2 * pairs)
    angles = np.arange(vision.positions, dtype=np.float32)[:, None] / np.float32(_ROPE_BASE) ** exponents
    tables = []
    for half in (np.concatenate([np.cos(angles)] * 2, 1), np.concatenate([-np.sin(angles), np.sin(angles)], 1)):
        stored = tower.stored(half)
        both = graph.op("Concat", *(graph.op("Gather", stored, index, axis=0) for index in (x, y)), axis=-1)
        tables.append(tower.shaped(both, (1, -1, 1, 4 * pairs)))
    return tables[0], tables[1]


def _layer(tower: Tower, vision: VisionTower, value: str, at: str, turns: tuple[str, str]) -> str:
    graph = tower.graph
    attended = _attention(tower, vision, tower.norm(value, f"{at}input_layernorm"), f"{at}self_attn.", turns)
    value = tower.added(value, attended, f"{at}post_attention_layernorm")
    normed = tower.norm(value, f"{at}pre_feedforward_layernorm")
    gate = graph.op("Gelu", tower.clipped(normed, f"{at}mlp.gate_proj"), approximate="tanh")
    product = graph.op("Mul", gate, tower.clipped(normed, f"{at}mlp.up_proj"))
    fed = tower.clipped(product, f"{at}mlp.down_proj")
    return tower.added(value, fed, f"{at}post_feedforward_layernorm")


def _attention(tower: Tower, vision: VisionTower, value: str, at: str, turns: tuple[str, str]) -> str:
    graph, size, heads = tower.graph, vision.hidden_size, vision.heads
    each = size // heads
    projected = []
    for name in ("q", "k", "v"):
        rows = tower.shaped(tower.clipped(value, f"{at}{name}_proj"), (1, -1, heads, each))
        rows = tower.plain_norm(rows, each) if name == "v" else _turned(graph, tower.norm(rows, f"{at}{name}_norm"), turns)
        projected.append(tower.shaped(rows, (1, -1, size)))
    # Without a mask, and in blocks: whole scores would take 0.3 GB at 280 soft rows of E2B, 4.9 GB at 1120.
    attended = graph.op("MultiHeadAttention", *projected, domain=CONTRIB, num_heads=heads, scale=1.0)
    return tower.clipped(attended, f"{at}o_proj")


def _turned(graph: GraphBuilder, value: str, turns: tuple[str, str]) -> str:
    first, second, third, fourth = graph.ops("Split", [value], 4, axis=-1, num_outputs=4)
    other = graph.op("Concat", second, first, fourth, third, axis=-1)
    return graph.op("Add", graph.op("Mul", value, turns[0]), graph.op("Mul", other, turns[1]))
