"""The audio tower as an ONNX graph. Math: transformers, models/gemma4/modeling_gemma4.py.

Attention is local: a block of 12 rows attends to itself and to the block before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edge_export.checkpoint.media_architecture import EMBED_AUDIO, MELS, AudioTower
from edge_export.onnx.graph_builder import GraphBuilder
from edge_export.onnx.media.tower import EPSILON, Tower

_BLOCK, _CONTEXT = 12, 24
_CAP = 50.0
_DISTANCES = 13
_KERNEL = 5


@dataclass(frozen=True)
class _Shared:
    """What all layers use: the mask [blocks, 1, 12, 24] and sines of relative positions [13, hidden size]."""

    mask: str
    positions: np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def build_audio(tower: Tower, audio: AudioTower, text_size: int) -> None:
    """Adds the tower from `mels` [1, 1, frames, 128] to `rows` [1, n, hidden size], n a multiple of 12.

    `filler` [1, m, tower's size] are zeros that fill the rows up; `mask` [n / 12, 1, 12, 24] is added to the scores of each block.
    """
    graph = tower.graph
    mels = graph.input("mels", "f32", (1, 1, "frames", MELS))
    filler = graph.input("filler", "f32", (1, "filler", audio.hidden_size))
    mask = graph.input("mask", "f32", ("blocks", 1, _BLOCK, _CONTEXT))
    value = _convolved(tower, _convolved(tower, mels, "layer0"), "layer1")
    value = tower.shaped(tower.turned(value, 0, 2, 3, 1), (1, -1, MELS // 4 * audio.channels[1]))
    value = tower.linear(value, "subsample_conv_projection.input_proj_linear.weight")
    value = graph.op("Concat", value, filler, axis=1)
    shared = _Shared(mask, _positions(audio.hidden_size))
    for layer in range(audio.layers):
        value = _layer(tower, audio, value, f"layers.{layer}.", shared)
    value = graph.op("Add", tower.linear(value, "output_proj.weight"), tower.vector("output_proj.bias"))
    rows = tower.linear(tower.plain_norm(value, audio.output_size), EMBED_AUDIO, outer=True)
    graph.output(graph.op("Identity", rows, name="rows"), "f32", (1, "rows", text_size))


def _positions(size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Sines and cosines of the distances 12 to 0."""
    step = math.log(10_000.0) / max(size // 2 - 1, 1)
    angles = np.arange(_DISTANCES - 1, -1, -1)[:, None] * np.exp(-step * np.arange(size // 2))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _convolved(tower: Tower, value: str, layer: str) -> str:
    graph, at = tower.graph, f"subsample_conv_projection.{layer}."
    value = graph.op("Conv", value, tower.vector(f"{at}conv.weight"), strides=[2, 2], pads=[1, 1, 1, 1], kernel_shape=[3, 3])
    last = tower.turned(value, 0, 2, 3, 1)
    normed = graph.op("LayerNormalization", last, tower.vector(f"{at}norm.weight"), axis=-1, epsilon=EPSILON)
    return graph.op("Relu", tower.turned(normed, 0, 3, 1, 2))


def _layer(tower: Tower, audio: AudioTower, value: str, at: str, shared: _Shared) -> str:
    value = _feed_forward(tower, value, f"{at}feed_forward1.")
    attended = _attention(tower, audio, tower.norm(value, f"{at}norm_pre_attn"), f"{at}self_attn.", shared)
    value = tower.added(value, attended, f"{at}norm_post_attn")
    value = _convolution(tower, audio, value, f"{at}lconv1d.")
    return tower.norm(_feed_forward(tower, value, f"{at}feed_forward2."), f"{at}norm_out")


def _silu(graph: GraphBuilder, value: str) -> str:
    return graph.op("Mul", value, graph.op("Sigmoid", value))


def _feed_forward(tower: Tower, value: str, at: str) -> str:
    fed = tower.clipped(tower.norm(value, f"{at}pre_layer_norm"), f"{at}ffw_layer_1")
    fed = tower.clipped(_silu(tower.graph, fed), f"{at}ffw_layer_2")
    return tower.added(value, fed, f"{at}post_layer_norm", 0.5)


def _convolution(tower: Tower, audio: AudioTower, value: str, at: str) -> str:
    graph = tower.graph
    both = tower.clipped(tower.norm(value, f"{at}pre_layer_norm"), f"{at}linear_start")
    kept, gate = graph.ops("Split", [both], 2, axis=-1, num_outputs=2)
    gated = tower.turned(graph.op("Mul", kept, graph.op("Sigmoid", gate)), 0, 2, 1)
    kernel = tower.vector(f"{at}depthwise_conv1d.weight")
    mixed = graph.op("Conv", gated, kernel, group=audio.hidden_size, kernel_shape=[_KERNEL], pads=[_KERNEL - 1, 0])
    normed = _silu(graph, tower.norm(tower.turned(mixed, 0, 2, 1), f"{at}conv_norm"))
    return graph.op("Add", value, tower.clipped(normed, f"{at}linear_end"))


def _attention(tower: Tower, audio: AudioTower, value: str, at: str, shared: _Shared) -> str:
    graph, heads = tower.graph, audio.heads
    each = audio.hidden_size // heads
    # The factors of q, of k and of the softcap are all in q's; relative keys are divided by k's.
    key_factor = math.log(1 + math.e) / math.log(2)
    scale = np.logaddexp(0, tower.values(f"{at}per_dim_scale").astype(np.float64)) * (key_factor * each**-0.5 / math.log(2) / _CAP)
    query, key, cached = (tower.shaped(tower.clipped(value, f"{at}{name}_proj"), (-1, _BLOCK, heads, each)) for name in ("q", "k", "v"))
    query = tower.turned(graph.op("Mul", query, tower.stored(scale)), 0, 2, 1, 3)
    key, cached = _with_block_before(graph, key, heads, each), _with_block_before(graph, cached, heads, each)
    relative = shared.positions @ tower.values(f"{at}relative_k_proj.weight").T / np.float32(key_factor)
    table = np.zeros((heads, each, _CONTEXT + 1), np.float32)
    table[:, :, :_DISTANCES] = relative.reshape(_DISTANCES, heads, each).transpose(1, 2, 0)
    # 25 columns read as rows of 24 move each row one further (arXiv:1901.02860, appendix B).
    moved = tower.shaped(graph.op("MatMul", query, tower.stored(table)), (-1, heads, _BLOCK * (_CONTEXT + 1)))
    moved = graph.op("Slice", moved, graph.integers([0]), graph.integers([_BLOCK * _CONTEXT]), graph.integers([2]))
    scores = graph.op("MatMul", query, tower.turned(key, 0, 2, 3, 1))
    scores = graph.op("Add", scores, tower.shaped(moved, (-1, heads, _BLOCK, _CONTEXT)))
    capped = graph.op("Mul", graph.op("Tanh", scores), graph.floats(_CAP))
    weights = graph.op("Softmax", graph.op("Add", capped, shared.mask), axis=-1)
    attended = tower.turned(graph.op("MatMul", weights, tower.turned(cached, 0, 2, 1, 3)), 0, 2, 1, 3)
    return tower.clipped(tower.shaped(attended, (1, -1, audio.hidden_size)), f"{at}post")


def _with_block_before(graph: GraphBuilder, blocks: str, heads: int, each: int) -> str:
    """Blocks [n, 12, heads, size] as [n, 24, heads, size], each behind the one before it, the first behind zeros."""
    all_but_last = graph.op("Slice", blocks, graph.integers([0]), graph.integers([-1]), graph.integers([0]))
    before = graph.op("Concat", graph.floats(np.zeros((1, _BLOCK, heads, each), np.float32)), all_but_last, axis=0)
    return graph.op("Concat", before, blocks, axis=1)
