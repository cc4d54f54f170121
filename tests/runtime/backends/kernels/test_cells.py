"""Attention over cells: right numbers, and the same bits wherever the rows lie and whatever else is in the batch, on every variant."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.backends.kernels import loader
from row_calls import CELL_BLOCKS, Array, Call, cell_attention, cell_rows, cell_values

VARIANTS = loader.usable_variants()
pytestmark = pytest.mark.skipif(not VARIANTS, reason="the row kernels were not built: pip install -e . builds them")
HALF = 0
HEADS = 3


def drawn(seed: int, kind: int, rows: int, cells: int, dim: int) -> tuple[Array, Array, Array, Array]:
    """Queries, stored keys and values, and a mask that leaves a third of the cells out."""
    random = np.random.default_rng(seed)
    queries, keys, values = (random.standard_normal((count, dim)).astype(np.float32) for count in (rows * HEADS, cells, cells))
    mask = np.where(random.random((rows, cells)) < 0.3, -np.inf, 0).astype(np.float16)
    return queries, cell_rows(kind, keys), cell_rows(kind, values), mask


def expected(kind: int, queries: Array, keys: Array, values: Array, mask: Array) -> NDArray[np.float64]:
    scores = queries.astype(np.float64) @ cell_values(kind, keys).T + np.repeat(mask.astype(np.float64), len(queries) // len(mask), axis=0)
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    result: NDArray[np.float64] = shares @ cell_values(kind, values) / shares.sum(axis=1, keepdims=True)
    return result


@pytest.mark.parametrize("kind", CELL_BLOCKS)
@pytest.mark.parametrize(("rows", "cells", "dim"), [(1, 1, 32), (2, 15, 64), (5, 33, 96), (4, 300, 128), (1, 1000, 256), (13, 64, 32)])
def test_numbers_are_right_and_the_same_on_every_variant(kind: int, rows: int, cells: int, dim: int) -> None:
    arrays = drawn(cells, kind, rows, cells, dim)
    arrays[3][:, 0] = 0  # every row attends to one cell at least
    first = cell_attention(kind, *arrays).here(VARIANTS[0])
    assert np.allclose(first, expected(kind, *arrays), rtol=1e-5, atol=1e-5)
    for variant in VARIANTS:
        for at_once in (1, 2, 3, 7, 16, 39, 64):
            assert np.array_equal(cell_attention(kind, *arrays, at_once=at_once).here(variant), first), (variant, at_once)


@pytest.mark.parametrize("dim", [1, 7, 17, 40])
def test_any_width_of_float16(dim: int) -> None:
    arrays = drawn(dim, HALF, 2, 50, dim)
    assert np.allclose(cell_attention(HALF, *arrays).here(VARIANTS[0]), expected(HALF, *arrays), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", CELL_BLOCKS)
def test_bits_depend_neither_on_where_rows_lie_nor_on_what_lies_between(kind: int) -> None:
    random = np.random.default_rng(5)
    queries, keys, values, mask = drawn(5, kind, 4, 200, 64)
    first = cell_attention(kind, queries, keys, values, mask).here(VARIANTS[0])
    for _ in range(5):
        places = random.permutation(700)[:200]
        moved = [np.full((700, keys.shape[1]), 255, np.uint8) for _ in range(2)]  # what is left out is no number
        wide = np.full((4, 700), -np.inf, np.float16)
        moved[0][places], moved[1][places], wide[:, places] = keys, values, mask
        for variant in VARIANTS:
            assert np.array_equal(cell_attention(kind, queries, *moved, wide).here(variant), first), variant


def test_rows_of_several_sequences_have_the_bits_of_each_alone() -> None:
    queries, keys, values, mask = drawn(6, HALF, 4, 240, 64)
    mask[:] = -np.inf
    for row in range(4):
        mask[row, row::4] = 0
    batch = cell_attention(HALF, queries, keys, values, mask).here(VARIANTS[0])
    for row in range(4):
        arrays = queries[row * HEADS : (row + 1) * HEADS], keys[row::4].copy(), values[row::4].copy(), np.zeros((1, 60), np.float16)
        assert np.array_equal(cell_attention(HALF, *arrays).here(VARIANTS[0]), batch[row * HEADS : (row + 1) * HEADS])


def test_small_shares_of_many_cells_add_up() -> None:
    """One cell outweighs each of 20000 others by e^12, but not all of them together."""
    keys = np.zeros((20001, 32), np.float32)
    keys[0, 0] = 12
    values = np.full((20001, 32), 2, np.float32)
    values[0] = 1
    queries = np.zeros((1, 32), np.float32)
    queries[0, 0] = 1
    arrays = queries, cell_rows(HALF, keys), cell_rows(HALF, values), np.zeros((1, 20001), np.float16)
    assert np.allclose(cell_attention(HALF, *arrays).here(VARIANTS[0]), expected(HALF, *arrays), rtol=1e-5)


def test_a_row_that_attends_to_nothing_is_zero_and_a_mask_adds_to_scores() -> None:
    queries, keys, values, mask = drawn(7, HALF, 3, 40, 64)
    mask[1] = -np.inf
    mask[2] = np.linspace(-3, 3, 40)
    result = cell_attention(HALF, queries, keys, values, mask).here(VARIANTS[0])
    assert not result[HEADS : 2 * HEADS].any()
    assert np.allclose(result[2 * HEADS :], expected(HALF, queries[2 * HEADS :], keys, values, mask[2:]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 5000.0])
@pytest.mark.parametrize("place", ["queries", "keys", "values"])
def test_what_is_no_number_reaches_the_rows_that_attend_to_it_alone(value: float, place: str) -> None:
    """A broken model is recognised by NaN in its logits."""
    queries, keys, values, mask = drawn(8, HALF, 4, 100, 64)
    mask[:, 10] = [0, -np.inf, 0, -np.inf]
    clean = cell_attention(HALF, queries, keys, values, mask).here(VARIANTS[0])
    if place == "queries":
        queries[0:HEADS, 3] = value
    else:
        (keys if place == "keys" else values).view(np.float16)[10, 3] = value
    broken = [0] if place == "queries" else [0, 2]
    for variant, at_once in itertools.product(VARIANTS, (HEADS, 64)):
        result = cell_attention(HALF, queries, keys, values, mask, at_once=at_once).here(variant).reshape(4, HEADS, -1)
        for row in range(4):
            if row not in broken:
                assert np.array_equal(result[row], clean.reshape(result.shape)[row]), (variant, row)
            elif place == "values" or np.isnan(value):
                assert np.isnan(result[row]).all(), (variant, row)


@pytest.mark.parametrize(
    "change", [{0: 3}, {0: -1}, {0: 1}, {1: 0}, {1: 1 << 40}, {2: 0}, {3: 0}, {4: 0}, {5: -1}, {4: 1 << 40}, {6: 0}, {6: 65}]
)
def test_shapes_that_cannot_be_are_refused(change: dict[int, int]) -> None:
    call: Call = cell_attention(HALF, *drawn(9, HALF, 1, 8, 20))
    call.here(VARIANTS[0])
    with pytest.raises(ValueError, match="refused"):
        replace(call, sizes=tuple(change.get(place, size) for place, size in enumerate(call.sizes))).here(VARIANTS[0])
