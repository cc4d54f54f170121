"""Four and eight bits: what is packed is what MatMulNBits multiplies with, and the search never loses more than rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_export.errors import ExportError
from edge_export.onnx.block_quantization import BITS, BLOCKS, PackedMatrix, WeightSpec, dequantize, quantize_matrix

SPECS = [WeightSpec(bits=bits, block=block) for bits in BITS for block in BLOCKS]
specs = st.sampled_from(SPECS)


@st.composite
def matrices(draw: st.DrawFn) -> Any:
    """float32 [N, K] of very different sizes, shapes and spreads, with equal and zero blocks among them."""
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 300))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    weight = random.standard_normal((rows, columns)) * 10.0 ** draw(st.integers(-30, 30))
    weight *= np.exp(draw(st.floats(0, 3)) * random.standard_normal((1, columns)))
    weight += draw(st.sampled_from([0, 1, -5])) * np.abs(weight).max()
    weight[random.random(weight.shape) < draw(st.sampled_from([0, 0.5, 1]))] = 0
    return weight.astype(np.float32)


def weighted_error(weight: Any, made: PackedMatrix | Any, importance: Any) -> float:
    values = dequantize(made) if isinstance(made, PackedMatrix) else made
    scale = max(float(np.abs(weight).max()), 1e-37)
    return float(np.sum(importance * ((values.astype(np.float64) - weight) / scale) ** 2))


def blocks_of(weight: Any, block: int) -> Any:
    columns = weight.shape[1]
    return np.pad(weight, ((0, 0), (0, -columns % block))).reshape(len(weight), -1, block)


def rounded(weight: Any, spec: WeightSpec) -> Any:
    """Weights [N, K] rounded to nearest: the farthest of a block gets level 0."""
    blocks, half = blocks_of(weight.astype(np.float64), spec.block), 1 << (spec.bits - 1)
    low, high = blocks.min(-1, keepdims=True), blocks.max(-1, keepdims=True)
    scales = -np.where(-low >= high, low, high) / half
    levels = np.clip(np.rint(np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales != 0)), -half, half - 1)
    return (levels * scales).reshape(len(weight), -1)[:, : weight.shape[1]]


@given(weight=matrices(), spec=specs, seed=st.integers(0, 1000), weighted=st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_search_never_loses_more_than_rounding(weight: Any, spec: WeightSpec, seed: int, weighted: bool) -> None:
    importance = np.random.default_rng(seed).gamma(0.5, 1, weight.shape[1]).astype(np.float32) + np.float32(1e-3)
    weights_importance = importance if weighted else None
    plain = weighted_error(weight, rounded(weight, spec), importance if weighted else 1.0)
    result = weighted_error(weight, quantize_matrix(weight, spec, weights_importance), importance if weighted else 1.0)
    assert result <= plain * 1.25 * (1 + 1e-5), "a scale that is rounded to float16 may cost a part"


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_search_is_clearly_better_on_bell_shaped_weights_with_float16_scales(spec: WeightSpec) -> None:
    """The row kernels keep scales as float16 where all of a matrix are such numbers."""
    weight = (np.random.default_rng(3).standard_normal((64, 512)) / 30).astype(np.float32)
    made = quantize_matrix(weight, spec)
    assert np.array_equal(made.scales.astype(np.float16).astype(np.float32), made.scales)
    assert weighted_error(weight, made, 1.0) < 0.95 * weighted_error(weight, rounded(weight, spec), 1.0)


def test_scales_beyond_float16_stay() -> None:
    """Of weights that would be 0, infinite, or much coarser."""
    sizes = np.array([[1e-8], [1e7], [1e-7]])
    weight = (np.random.default_rng(4).standard_normal((3, 128)) * sizes).astype(np.float32)
    scales = quantize_matrix(weight, WeightSpec(bits=4, block=32)).scales
    assert np.isfinite(scales).all()
    assert (scales != 0).all()
    assert not np.equal(scales.astype(np.float64) * 2**24 % 1, 0)[[0, 2]].any()


@pytest.mark.parametrize(("bits", "size"), [(8, 0.001), (4, 1e-5)])
def test_a_row_of_small_weights_has_float16_scales_too(bits: int, size: float) -> None:
    """Else all scales of the matrix are read as float32; these are subnormal."""
    weight = (np.random.default_rng(4).standard_normal((8, 256)) / 30).astype(np.float32)
    weight[3] *= 30 * size
    spec = WeightSpec(bits=bits, block=128)
    made = quantize_matrix(weight, spec)
    assert 0 < np.abs(made.scales[3]).max() < 2.0**-14
    assert np.array_equal(made.scales.astype(np.float16).astype(np.float32), made.scales)
    assert weighted_error(weight[3:4], dequantize(made)[3:4], 1.0) <= 1.25 * weighted_error(weight[3:4], rounded(weight[3:4], spec), 1.0)


def test_importance_helps_where_it_is_large() -> None:
    weight = np.random.default_rng(2).standard_normal((128, 256)).astype(np.float32)
    importance = np.ones(256, np.float32)
    importance[::16] = 200
    spec = WeightSpec(bits=4, block=32)
    blind, seeing = (dequantize(quantize_matrix(weight, spec, counts)) - weight for counts in (None, importance))
    assert np.mean(seeing[:, ::16] ** 2) < 0.5 * np.mean(blind[:, ::16] ** 2)
    assert np.mean(seeing**2) > np.mean(blind**2), "what the others lose"


def test_columns_without_any_importance_keep_their_weights() -> None:
    weight = np.random.default_rng(3).standard_normal((4, 64)).astype(np.float32)
    importance = np.zeros(64, np.float32)
    importance[:4] = 1
    for counts in (importance, np.zeros(64, np.float32)):
        result = quantize_matrix(weight, WeightSpec(bits=4, block=32), counts)
        assert np.abs(dequantize(result) - weight).max() < 0.35


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_zero_and_equal_blocks_are_exact(spec: WeightSpec) -> None:
    weight = np.zeros((3, 2 * spec.block), np.float32)
    weight[1], weight[2] = 0.75, -1.5
    assert np.allclose(dequantize(quantize_matrix(weight, spec)), weight, rtol=1e-6, atol=0)
    assert np.array_equal(dequantize(quantize_matrix(weight[:1], spec)), weight[:1])


def test_a_matrix_in_pieces_is_the_same_matrix() -> None:
    weight = np.random.default_rng(4).standard_normal((3000, 96)).astype(np.float32)
    spec = WeightSpec(bits=4, block=64)
    whole, halves = quantize_matrix(weight, spec), [quantize_matrix(part, spec) for part in (weight[:1001], weight[1001:])]
    for field in ("packed", "scales"):
        assert np.array_equal(getattr(whole, field), np.concatenate([getattr(half, field) for half in halves]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weight = np.zeros((3000, 64), np.float32)
    weight[2711, 5] = value
    with pytest.raises(ExportError, match=rf"row 2711, column 5 of a matrix is {value}; such weights cannot be quantized"):
        quantize_matrix(weight, WeightSpec(bits=4, block=32))


def test_what_does_not_fit_is_refused() -> None:
    weight, spec = np.ones((2, 64), np.float32), WeightSpec(bits=4, block=32)
    with pytest.raises(ExportError, match=r"importance has shape \[63\], the matrix 64 columns"):
        quantize_matrix(weight, spec, np.ones(63, np.float32))
    for value in (-1, np.inf, np.nan):
        with pytest.raises(ExportError, match="negative or not finite"):
            quantize_matrix(weight, spec, np.full(64, value, np.float32))
    with pytest.raises(ExportError, match=r"shape \[64\] is not a matrix"):
        quantize_matrix(weight[0], spec)
    with pytest.raises(ExportError, match="3 bits in blocks of 48 is no weight format; bits are 4 or 8, blocks 32 or 64 or 128"):
        WeightSpec(bits=3, block=48)


@pytest.mark.parametrize("columns", [96, 128, 200])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_onnx_runtime_multiplies_with_the_dequantized_weights(spec: WeightSpec, columns: int) -> None:
    pytest.importorskip("onnx", reason="builds the graph")
    runtime = pytest.importorskip("onnxruntime", reason="runs MatMulNBits")
    from kernel_graphs import FLOAT, graph_of, helper

    random = np.random.default_rng(columns)
    weight, rows = random.standard_normal((48, columns)).astype(np.float32), random.standard_normal((5, columns)).astype(np.float32)
    result = quantize_matrix(weight, spec, random.random(columns).astype(np.float32))
    sizes = {"K": columns, "N": 48, "bits": spec.bits, "block_size": spec.block, "accuracy_level": 1}
    node = helper.make_node("MatMulNBits", ["A", "B", "scales"], ["Y"], domain="com.microsoft", **sizes)
    model = graph_of([node], {"A": (FLOAT, [5, columns])}, ["Y"], {"B": result.packed, "scales": result.scales})
    session = runtime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (product,) = session.run(None, {"A": rows})
    assert np.allclose(product, rows @ dequantize(result).T, atol=2e-4)


def test_a_row_with_a_large_spread_keeps_its_small_blocks() -> None:
    weight = np.concatenate([np.full((1, 32), 1e30), np.random.default_rng(5).standard_normal((1, 32)) * 1e-30], axis=1).astype(np.float32)
    result = dequantize(quantize_matrix(weight, WeightSpec(bits=4, block=32)))
    assert np.corrcoef(result[0, 32:] * 1e30, weight[0, 32:] * 1e30)[0, 1] > 0.98
