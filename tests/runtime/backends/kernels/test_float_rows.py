"""Products of float weights: right numbers, and a row's bits in every batch and on every variant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.backends.kernels import loader
from row_calls import float_multiplication

VARIANTS = loader.usable_variants()
pytestmark = pytest.mark.skipif(not VARIANTS, reason="the row kernels were not built: pip install -e . builds them")
TYPES = ("float32", "float16", "bfloat16")


def stored(weights: NDArray[np.float32], name: str) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Weights of a type, and the numbers that they stand for."""
    if name == "bfloat16":
        bits = (weights.view(np.uint32) >> 16).astype(np.uint16)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    cast = weights.astype(name)
    return cast, cast.astype(np.float64)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 15), (16, 16), (70, 100), (33, 2048)])
def test_numbers_are_right_and_bits_the_same_in_every_batch_and_on_every_variant(name: str, outputs: int, inputs: int) -> None:
    random = np.random.default_rng(outputs)
    weights, values = (random.standard_normal((count, inputs)).astype(np.float32) for count in (outputs, 37))
    kept, numbers = stored(weights, name)
    every_row = float_multiplication(kept, values).here(VARIANTS[0])
    np.testing.assert_allclose(every_row, values.astype(np.float64) @ numbers.T, rtol=1e-4, atol=1e-4)
    for variant in VARIANTS:
        for rows in (1, 2, 3, 4, 5, 8, 13, 16, 17, 37):
            for first in {0, 37 - rows}:
                batch = float_multiplication(kept, values[first : first + rows]).here(variant)
                assert np.array_equal(batch, every_row[first : first + rows]), (variant, rows, first)


def test_half_precision_has_its_small_and_its_largest_numbers() -> None:
    weights = np.array([[6e-8, -6e-8, 65504, 1e-4]], np.float16)
    for column in range(4):
        values = np.eye(4, dtype=np.float32)[column : column + 1]
        for variant in VARIANTS:
            assert float_multiplication(weights, values).here(variant) == np.float32(weights[0, column])


def test_what_is_no_number_reaches_its_row_only() -> None:
    weights, values = np.ones((5, 40), np.float16), np.ones((9, 40), np.float32)
    values[3, 20] = np.nan
    for variant in VARIANTS:
        assert np.isnan(float_multiplication(weights, values).here(variant)).all(axis=1).tolist() == [row == 3 for row in range(9)]


def test_a_name_or_a_shape_that_cannot_be_is_refused() -> None:
    weights, values = np.ones((5, 40), np.float32), np.ones((2, 40), np.float32)
    for call, variant in (
        (float_multiplication(weights, values), "mmx"),
        (float_multiplication(weights[:0], values), VARIANTS[0]),
        (float_multiplication(weights, values[:0]), VARIANTS[0]),
    ):
        with pytest.raises(ValueError, match="was refused"):
            call.here(variant)
