"""The encoders of images and sound as ONNX graphs. Math: transformers, models/gemma4/modeling_gemma4.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.media_architecture import (
    AUDIO,
    EMBED_AUDIO,
    EMBED_VISION,
    MELS,
    VISION,
    AudioTower,
    VisionTower,
    media_architecture,
)
from edge_export.checkpoint.safetensors import read_rows, read_values
from edge_export.onnx.graph_builder import GraphBuilder
from edge_export.onnx.request import Block, MediaWeights, OnnxRequest, check_towers
from edge_export.onnx.weights import WeightFile, WeightFormat, weight_format
from edge_export.output import BundlePart
from edge_runtime.bundle.manifest import AUDIO_ENCODER, VISION_ENCODER
from edge_runtime.bundle.onnx_graph import CONTRIB

EPSILON = 1e-6


class Tower:
    """The graph of an encoder's tower while it is built. It reads the checkpoint's tensors whose names begin with `prefix`.

    `format` applies to the matrices of the layers. The few matrices outside the layers are never block-quantized.
    """

    def __init__(self, graph: GraphBuilder, checkpoint: Checkpoint, weights: WeightFile, format: WeightFormat, prefix: str) -> None:
        self.graph = graph
        self._checkpoint, self._weights, self._format, self._prefix = checkpoint, weights, format, prefix
        self._outer = WeightFormat(kind="f16") if format.kind == "blocks" else format

    def values(self, name: str) -> NDArray[np.float32]:
        """Returns the values of a tensor; `name` does not include the prefix."""
        return read_values(self._checkpoint.others[self._prefix + name])

    def stored(self, values: NDArray[np.floating[Any]]) -> str:
        """Writes values into the data file as float32, and returns the weight's name in the graph."""
        return self.graph.weight(self._weights.array(values.astype(np.float32), "f32"))

    def vector(self, name: str) -> str:
        """Writes a small tensor into the data file, and returns the weight's name in the graph."""
        return self.stored(self.values(name))

    def linear(self, value: str, name: str, *, outer: bool = False) -> str:
        """Returns value times the transposed matrix `name`. With `outer`, it is outside the layers and `name` is its full name."""
        full = name if outer else f"{self._prefix}{name}"
        tensor = self._checkpoint.others[full]
        rows, columns = tensor.shape
        matrix = self._weights.matrix_of(read_rows(tensor), full, rows, columns, self._outer if outer else self._format)
        return self.graph.linear(value, matrix)

    def clipped(self, value: str, name: str) -> str:
        """Returns a product whose input and output are clipped if the checkpoint has bounds for them."""
        value = self._clip(value, name, "input")
        return self._clip(self.linear(value, f"{name}.linear.weight"), name, "output")

    def _clip(self, value: str, name: str, side: str) -> str:
        if f"{self._prefix}{name}.{side}_min" not in self._checkpoint.others:
            return value
        bounds = [float(self.values(f"{name}.{side}_{end}").reshape(-1)[0]) for end in ("min", "max")]
        if not np.isfinite(bounds).any():
            return value
        return self.graph.op("Clip", value, *(self.graph.floats(np.array(bound, np.float32)) for bound in bounds))

    def norm(self, value: str, name: str) -> str:
        """RMS norm with the weight `name`."""
        weight = self.values(f"{name}.weight")
        return self._normed(value, self.stored(weight), len(weight))

    def plain_norm(self, value: str, size: int) -> str:
        """RMS norm of rows of `size` without a weight."""
        return self._normed(value, self.graph.floats(np.ones(size, np.float32)), size)

    def _normed(self, value: str, weight: str, width: int) -> str:
        normed = self.graph.fresh("normed")
        with self.graph.kernel("NormRows", [value, weight], [normed], epsilon=EPSILON, width=width) as body:
            body.graph.op("RMSNormalization", *body.inputs, name=body.outputs[0], axis=-1, epsilon=EPSILON)
        return normed

    def added(self, value: str, branch: str, name: str, factor: float = 1.0) -> str:
        """Returns value plus the RMS norm of a branch; the norm's weight `name` is multiplied by `factor`."""
        weight, total = self.values(f"{name}.weight") * np.float32(factor), self.graph.fresh("sum")
        inputs = [value, branch, self.stored(weight), "", ""]
        with self.graph.kernel("ResidualRows", inputs, [total], epsilon=EPSILON, width=len(weight)) as body:
            rows, other, scale, *_ = body.inputs
            normed = body.graph.op("RMSNormalization", other, scale, axis=-1, epsilon=EPSILON)
            body.graph.op("Add", rows, normed, name=body.outputs[0])
        return total

    def reshaped(self, value: str, shape: Sequence[int]) -> str:
        """Reshapes value; -1 stands for a size known only at run time."""
        return self.graph.op("Reshape", value, self.graph.integers(shape))

    def transposed(self, value: str, *order: int) -> str:
        """Transposes value to this order of axes."""
        return self.graph.op("Transpose", value, perm=list(order))


# The nine patches of one soft row follow each other, so that pooling is a mean over adjacent rows. Attention does not depend on the order.

_PIXELS, _GROUP = 768, 9
_ROPE_BASE = 100.0


def build_vision(tower: Tower, vision: VisionTower, text_size: int) -> None:
    """Builds the vision tower. Inputs: `patches` [1, n, 768] with values in [0, 1], and their positions `x` [n] and `y` [n].

    Output: `rows` [1, n / 9, text_size].
    """
    graph = tower.graph
    patches = graph.input("patches", "f32", (1, "patches", _PIXELS))
    x, y = graph.input("x", "i64", ("patches",)), graph.input("y", "i64", ("patches",))
    scaled = graph.op("Mul", graph.op("Sub", patches, graph.floats(0.5)), graph.floats(2.0))
    table = tower.values("patch_embedder.position_embedding_table")
    embedded = graph.op("Add", *(graph.op("Gather", tower.stored(part), index, axis=0) for part, index in zip(table, (x, y), strict=True)))
    value = graph.op("Add", tower.linear(scaled, "patch_embedder.input_proj.weight"), embedded)
    rotations = _rotation_tables(tower, vision, x, y)
    for layer in range(vision.layers):
        value = _image_layer(tower, vision, value, f"encoder.layers.{layer}.", rotations)
    size = vision.hidden_size
    pooled = graph.op("ReduceMean", tower.reshaped(value, (1, -1, _GROUP, size)), graph.integers([2]), keepdims=0)
    pooled = graph.op("Mul", pooled, graph.floats(math.sqrt(size)))
    rows = tower.linear(tower.plain_norm(pooled, size), EMBED_VISION, outer=True)
    graph.output(graph.op("Identity", rows, name="rows"), "f32", (1, "rows", text_size))


def _rotation_tables(tower: Tower, vision: VisionTower, x: str, y: str) -> tuple[str, str]:
    """Cosines and signed sines [1, n, 1, head size]. The first half of a head is rotated by x, the second by y."""
    graph, pairs = tower.graph, vision.hidden_size // vision.heads // 4
    # transformers computes these in float32, too.
    exponents = np.arange(0, 2 * pairs, 2, dtype=np.float32) / np.float32(2 * pairs)
    angles = np.arange(vision.positions, dtype=np.float32)[:, None] / np.float32(_ROPE_BASE) ** exponents
    tables = []
    for half in (np.concatenate([np.cos(angles)] * 2, 1), np.concatenate([-np.sin(angles), np.sin(angles)], 1)):
        stored = tower.stored(half)
        both = graph.op("Concat", *(graph.op("Gather", stored, index, axis=0) for index in (x, y)), axis=-1)
        tables.append(tower.reshaped(both, (1, -1, 1, 4 * pairs)))
    return tables[0], tables[1]


def _image_layer(tower: Tower, vision: VisionTower, value: str, at: str, rotations: tuple[str, str]) -> str:
    graph = tower.graph
    attended = _image_attention(tower, vision, tower.norm(value, f"{at}input_layernorm"), f"{at}self_attn.", rotations)
    value = tower.added(value, attended, f"{at}post_attention_layernorm")
    normed = tower.norm(value, f"{at}pre_feedforward_layernorm")
    gate = graph.op("Gelu", tower.clipped(normed, f"{at}mlp.gate_proj"), approximate="tanh")
    product = graph.op("Mul", gate, tower.clipped(normed, f"{at}mlp.up_proj"))
    fed = tower.clipped(product, f"{at}mlp.down_proj")
    return tower.added(value, fed, f"{at}post_feedforward_layernorm")


def _image_attention(tower: Tower, vision: VisionTower, value: str, at: str, rotations: tuple[str, str]) -> str:
    graph, size, heads = tower.graph, vision.hidden_size, vision.heads
    head_size = size // heads
    projected = []
    for name in ("q", "k", "v"):
        rows = tower.reshaped(tower.clipped(value, f"{at}{name}_proj"), (1, -1, heads, head_size))
        rows = tower.plain_norm(rows, head_size) if name == "v" else _rotated(graph, tower.norm(rows, f"{at}{name}_norm"), rotations)
        projected.append(tower.reshaped(rows, (1, -1, size)))
    # This operator computes attention in blocks. The full scores would take 0.3 GB at 280 soft rows of E2B, and 4.9 GB at 1120.
    attended = graph.op("MultiHeadAttention", *projected, domain=CONTRIB, num_heads=heads, scale=1.0)
    return tower.clipped(attended, f"{at}o_proj")


def _rotated(graph: GraphBuilder, value: str, rotations: tuple[str, str]) -> str:
    first, second, third, fourth = graph.ops("Split", [value], 4, axis=-1, num_outputs=4)
    other = graph.op("Concat", second, first, fourth, third, axis=-1)
    return graph.op("Add", graph.op("Mul", value, rotations[0]), graph.op("Mul", other, rotations[1]))


# Attention of the audio tower is local: a block of 12 rows attends to itself and to the block before it.

_BLOCK, _CONTEXT = 12, 24
_CAP = 50.0
_DISTANCES = 13
_KERNEL = 5


@dataclass(frozen=True)
class _Shared:
    """Values that all layers use: the mask [blocks, 1, 12, 24], and the sines and cosines of relative positions [13, hidden size]."""

    mask: str
    positions: np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def build_audio(tower: Tower, audio: AudioTower, text_size: int) -> None:
    """Builds the audio tower from `mels` [1, 1, frames, 128] to `rows` [1, n, text_size], where n is a multiple of 12.

    The input `filler` [1, m, tower's hidden size] is zeros, which pad the rows to a multiple of 12. The input `mask` [n / 12, 1, 12, 24] is
    added to the scores of each block.
    """
    graph = tower.graph
    mels = graph.input("mels", "f32", (1, 1, "frames", MELS))
    filler = graph.input("filler", "f32", (1, "filler", audio.hidden_size))
    mask = graph.input("mask", "f32", ("blocks", 1, _BLOCK, _CONTEXT))
    value = _convolved(tower, _convolved(tower, mels, "layer0"), "layer1")
    value = tower.reshaped(tower.transposed(value, 0, 2, 3, 1), (1, -1, MELS // 4 * audio.channels[1]))
    value = tower.linear(value, "subsample_conv_projection.input_proj_linear.weight")
    value = graph.op("Concat", value, filler, axis=1)
    shared = _Shared(mask, _positions(audio.hidden_size))
    for layer in range(audio.layers):
        value = _sound_layer(tower, audio, value, f"layers.{layer}.", shared)
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
    last = tower.transposed(value, 0, 2, 3, 1)
    normed = graph.op("LayerNormalization", last, tower.vector(f"{at}norm.weight"), axis=-1, epsilon=EPSILON)
    return graph.op("Relu", tower.transposed(normed, 0, 3, 1, 2))


def _sound_layer(tower: Tower, audio: AudioTower, value: str, at: str, shared: _Shared) -> str:
    value = _feed_forward(tower, value, f"{at}feed_forward1.")
    attended = _sound_attention(tower, audio, tower.norm(value, f"{at}norm_pre_attn"), f"{at}self_attn.", shared)
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
    gated = tower.transposed(graph.op("Mul", kept, graph.op("Sigmoid", gate)), 0, 2, 1)
    kernel = tower.vector(f"{at}depthwise_conv1d.weight")
    mixed = graph.op("Conv", gated, kernel, group=audio.hidden_size, kernel_shape=[_KERNEL], pads=[_KERNEL - 1, 0])
    normed = _silu(graph, tower.norm(tower.transposed(mixed, 0, 2, 1), f"{at}conv_norm"))
    return graph.op("Add", value, tower.clipped(normed, f"{at}linear_end"))


def _sound_attention(tower: Tower, audio: AudioTower, value: str, at: str, shared: _Shared) -> str:
    graph, heads = tower.graph, audio.heads
    head_size = audio.hidden_size // heads
    # The factors of q, of k and of the softcap are all folded into q's. Relative keys have no factor, so they are divided by k's.
    key_factor = math.log(1 + math.e) / math.log(2)
    scale = np.logaddexp(0, tower.values(f"{at}per_dim_scale").astype(np.float64)) * (key_factor * head_size**-0.5 / math.log(2) / _CAP)
    query, key, values = (
        tower.reshaped(tower.clipped(value, f"{at}{name}_proj"), (-1, _BLOCK, heads, head_size)) for name in ("q", "k", "v")
    )
    query = tower.transposed(graph.op("Mul", query, tower.stored(scale)), 0, 2, 1, 3)
    key, values = _with_block_before(graph, key, heads, head_size), _with_block_before(graph, values, heads, head_size)
    relative = shared.positions @ tower.values(f"{at}relative_k_proj.weight").T / np.float32(key_factor)
    table = np.zeros((heads, head_size, _CONTEXT + 1), np.float32)
    table[:, :, :_DISTANCES] = relative.reshape(_DISTANCES, heads, head_size).transpose(1, 2, 0)
    # Reading rows of 25 columns as rows of 24 shifts each row one column further than the row before (arXiv:1901.02860, appendix B).
    shifted = tower.reshaped(graph.op("MatMul", query, tower.stored(table)), (-1, heads, _BLOCK * (_CONTEXT + 1)))
    shifted = graph.op("Slice", shifted, graph.integers([0]), graph.integers([_BLOCK * _CONTEXT]), graph.integers([2]))
    scores = graph.op("MatMul", query, tower.transposed(key, 0, 2, 3, 1))
    scores = graph.op("Add", scores, tower.reshaped(shifted, (-1, heads, _BLOCK, _CONTEXT)))
    capped = graph.op("Mul", graph.op("Tanh", scores), graph.floats(_CAP))
    weights = graph.op("Softmax", graph.op("Add", capped, shared.mask), axis=-1)
    attended = tower.transposed(graph.op("MatMul", weights, tower.transposed(values, 0, 2, 1, 3)), 0, 2, 1, 3)
    return tower.clipped(tower.reshaped(attended, (1, -1, audio.hidden_size)), f"{at}post")


def _with_block_before(graph: GraphBuilder, blocks: str, heads: int, head_size: int) -> str:
    """Extends blocks [n, 12, heads, size] to [n, 24, heads, size]: each follows the block before it, and the first follows zeros."""
    all_but_last = graph.op("Slice", blocks, graph.integers([0]), graph.integers([-1]), graph.integers([0]))
    before = graph.op("Concat", graph.floats(np.zeros((1, _BLOCK, heads, head_size), np.float32)), all_but_last, axis=0)
    return graph.op("Concat", before, blocks, axis=1)


_QUANTIZATION_BLOCK: Block = 32


def write_encoders(
    checkpoint: Checkpoint, weights: MediaWeights, folder: Path, progress: Callable[[int], None]
) -> tuple[tuple[BundlePart, ...], set[str]]:
    """Writes the encoders' graphs. Each has its own data file, so that it can be loaded alone.

    Returns the files and the contrib operators that they use. Raises CheckpointError.
    """
    media = media_architecture(checkpoint)
    vision, audio = check_towers(media)
    towers: list[tuple[str, str, Callable[[Tower], None]]] = [
        (VISION_ENCODER, VISION, lambda tower: build_vision(tower, vision, media.text_size))
    ]
    if audio is not None:
        towers.append((AUDIO_ENCODER, AUDIO, lambda tower: build_audio(tower, audio, media.text_size)))
    parts: list[BundlePart] = []
    contrib_ops: set[str] = set()
    for role, prefix, build in towers:
        path = folder / f"{role.replace('_', '-')}-{weights}.onnx"
        data = path.with_suffix(".onnx_data")
        format = weight_format(weights, OnnxRequest(block=_QUANTIZATION_BLOCK))
        graph = GraphBuilder(role, kernels=format.kind == "blocks")
        with WeightFile(data, progress) as file:
            build(Tower(graph, checkpoint, file, format, prefix))
        graph.save(path)
        parts.append(BundlePart(role=role, path=path, format="onnx", quantization=weights))
        parts.append(BundlePart(role=f"{role}_data", path=data, format="onnx_data", quantization=weights))
        contrib_ops |= graph.contrib_ops
    return tuple(parts), contrib_ops
