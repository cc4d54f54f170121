"""Error compensation: under the inputs' second moments no row loses more than by rounding, and correlated inputs gain much."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_export.onnx.block_quantization import WeightSpec, dequantize, quantize_matrix
from edge_export.quantization.importance import Factor, Rounded, compensated, factor_of

DAMPING = 0.01


def moments_of(columns: int, seed: int) -> Any:
    """The second moments of inputs that share a few directions."""
    random = np.random.default_rng(seed)
    shared = random.standard_normal((4 * columns, 8)) @ random.standard_normal((8, columns)) / np.sqrt(8)
    rows = 0.8 * shared + 0.2 * random.standard_normal((4 * columns, columns))
    rows *= np.exp(random.standard_normal(columns))
    return (rows.T @ rows / len(rows)).astype(np.float32)


def factored(moments: Any) -> Factor:
    result = factor_of(moments, DAMPING)
    assert result is not None
    return result


def losses(weight: Any, made: Any, moments: Any) -> Any:
    """The error of each row under the damped moments."""
    damped = moments.astype(np.float64) + DAMPING * np.trace(moments.astype(np.float64)) / len(moments) * np.eye(len(moments))
    off = weight.astype(np.float64) - made
    return np.einsum("nk,kj,nj->n", off, damped, off)


def weights_of(rows: int, columns: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


@given(rows=st.integers(1, 6), columns=st.integers(1, 200), block=st.sampled_from([32, 64, 128]), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_no_row_loses_more(rows: int, columns: int, block: int, seed: int) -> None:
    weight, moments = weights_of(rows, columns, seed), moments_of(columns, seed)
    spec = WeightSpec(bits=4, block=block)
    importance = np.diag(moments).copy()
    plain, made = (quantize_matrix(weight, spec, importance, factor) for factor in (None, factored(moments)))
    before, after = (losses(weight, dequantize(each), moments) for each in (plain, made))
    assert (after <= before * (1 + 1e-3)).all()
    assert (made.packed.shape, made.scales.shape) == (plain.packed.shape, plain.scales.shape)


def test_correlated_inputs_gain_and_the_result_is_repeatable() -> None:
    weight, moments = weights_of(64, 512, 1), moments_of(512, 2)
    spec = WeightSpec(bits=4, block=128)
    factor = factored(moments)
    plain, made, again = (quantize_matrix(weight, spec, None, each) for each in (None, factor, factor))
    before, after = (losses(weight, dequantize(each), moments).sum() for each in (plain, made))
    assert after < 0.5 * before
    assert np.array_equal(made.packed, again.packed)
    assert np.array_equal(made.scales, again.scales)
    # A piece of the rows gives the same rows.
    part = quantize_matrix(weight[10:20], spec, None, factor)
    assert np.mean(part.packed == made.packed[10:20]) > 0.999


def test_independent_inputs_gain_nothing_on_a_fixed_grid() -> None:
    weight = weights_of(8, 96, 3)
    scales = np.abs(weight).reshape(8, 3, 32).max(axis=2) / 7
    steps = np.repeat(scales, 32, axis=1)
    levels = (np.clip(np.rint(weight / steps), -8, 7) + 8).astype(np.uint8)
    plain = Rounded(levels=levels, scales=scales, offsets=-8 * scales, group=32, top=15)
    diagonal = np.diag(np.random.default_rng(4).uniform(0.1, 9, 96)).astype(np.float32)
    assert np.array_equal(compensated(weight, plain, factored(diagonal)).levels, levels)
    made = compensated(weight, plain, factored(moments_of(96, 5)))
    assert not np.array_equal(made.levels, levels)
    assert np.array_equal(made.scales, scales)


def test_eight_bits_stay() -> None:
    weight, factor = weights_of(4, 64, 6), factored(moments_of(64, 7))
    spec = WeightSpec(bits=8, block=32)
    assert np.array_equal(quantize_matrix(weight, spec).packed, quantize_matrix(weight, spec, None, factor).packed)


@pytest.mark.parametrize("columns", [1, 255, 257, 600])
def test_the_factor_is_that_of_the_moments(columns: int) -> None:
    moments = moments_of(columns, 9)
    factor = factored(moments)
    damped = moments + DAMPING * np.trace(moments) / columns * np.eye(columns)
    assert np.allclose(factor.root @ factor.root.T, damped, atol=1e-4 * np.trace(damped) / columns)
    assert np.allclose(factor.root @ factor.inverse, np.eye(columns), atol=1e-3)
    assert not np.tril(factor.root, -1).any()
    assert not np.tril(factor.inverse, -1).any()
    assert factor_of(np.zeros((columns, columns), np.float32), DAMPING) is None


def test_weights_near_the_ends_of_float32_stay_finite() -> None:
    factor = factored(moments_of(64, 10))
    for size in (1e37, 1e-30):
        weight = weights_of(3, 64, 11) * np.float32(size)
        made = dequantize(quantize_matrix(weight, WeightSpec(bits=4, block=32), None, factor))
        assert np.isfinite(made).all()
        assert np.abs(made - weight).max() < 0.5 * np.abs(weight).max()


def test_moments_that_do_not_factor_are_damped_more() -> None:
    indefinite = np.array([[1.0, 2.0], [2.0, 1.0]], np.float32)
    factor = factored(indefinite)
    product = factor.root @ factor.root.T
    assert product[0, 1] == pytest.approx(2.0)
    assert product[0, 0] > 1.9
    assert factor_of(np.full((2, 2), np.nan, np.float32), DAMPING) is None
    assert factor_of(np.zeros((2, 2), np.float32), DAMPING) is None
