"""GELU gates, tanh and norms of the kernels: right numbers, the same bits on every variant and for every number of values."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.backends.kernels import loader
from row_calls import gate, norm_of, tanh_of

VARIANTS = loader.usable_variants()
pytestmark = pytest.mark.skipif(not VARIANTS, reason="the row kernels were not built: pip install -e . builds them")
VALUES = np.concatenate([np.linspace(-12, 12, 5003), np.logspace(-30, 0, 61), -np.logspace(-30, 0, 61)]).astype(np.float32)


def gelu(values: NDArray[np.float32]) -> NDArray[np.float64]:
    x = values.astype(np.float64)
    result: NDArray[np.float64] = x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return result


def test_gates_are_gelu_times_values() -> None:
    others = np.random.default_rng(1).standard_normal(len(VALUES)).astype(np.float32)
    result = gate(VALUES, others).here(VARIANTS[0])
    np.testing.assert_allclose(result, gelu(VALUES) * others, rtol=2e-6, atol=1e-6)


def test_tanh_is_right_for_small_and_large_values() -> None:
    np.testing.assert_allclose(tanh_of(VALUES).here(VARIANTS[0]), np.tanh(VALUES.astype(np.float64)), rtol=4e-7)


def test_what_is_no_number_or_very_large() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 0, -0.0], np.float32)
    for variant in VARIANTS:
        np.testing.assert_array_equal(tanh_of(values).here(variant), [np.nan, 1, -1, 1, -1, 0, 0])
        np.testing.assert_array_equal(gate(values, np.ones_like(values)).here(variant), [np.nan, np.inf, np.nan, np.float32(1e30), 0, 0, 0])


@pytest.mark.parametrize("count", [1, 7, 15, 16, 17, 64, 1001])
def test_bits_are_the_same_on_every_variant_and_wherever_a_call_begins(count: int) -> None:
    random = np.random.default_rng(count)
    gates, values = (8 * random.standard_normal((2, count))).astype(np.float32)
    for made in (gate(gates, values), tanh_of(gates), norm_of(gates, values)):
        first = made.here(VARIANTS[0])
        assert all(np.array_equal(made.here(variant), first) for variant in VARIANTS)
    whole = gate(gates, values).here(VARIANTS[0])
    for begin in {0, count // 3, count - 1}:
        assert np.array_equal(gate(gates[begin:], values[begin:]).here(VARIANTS[0]), whole[begin:])


def test_a_name_or_a_count_that_cannot_be_is_refused() -> None:
    nothing = np.zeros(0, np.float32)
    for call, variant in ((gate(nothing, nothing), VARIANTS[0]), (norm_of(nothing, nothing), VARIANTS[0]), (tanh_of(VALUES), "mmx")):
        with pytest.raises(ValueError, match="was refused"):
            call.here(variant)
