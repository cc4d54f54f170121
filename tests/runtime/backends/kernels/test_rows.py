"""The row kernels: right numbers, and each row's bits the same whatever else is in its batch, on every variant this processor can run."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.backends.kernels import loader
from row_calls import (
    GGUF_BLOCKS,
    HALVES,
    Q4_K,
    Q5_1,
    Q5_K,
    Q6_K,
    Call,
    float_multiplication,
    gate,
    gguf_multiplication,
    gguf_weights,
    multiplication,
    norm_of,
    static_multiplication,
    tanh_of,
)

KERNELS = loader.load_library()
VARIANTS = loader.usable_variants()
pytestmark = pytest.mark.skipif(not VARIANTS, reason="the row kernels were not built: pip install -e . builds them")
# Tails of a tile, one block, several blocks, more tiles than a register group.
SHAPES = [(1, 1), (5, 1), (16, 2), (33, 3), (100, 4), (257, 2)]
# Inputs that many rows take in several parts.
LONG = 2176
BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 17, 24, 29)

Matrix = tuple[NDArray[np.uint8], NDArray[np.float32]]


def packed(levels: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Levels [outputs, inputs] as MatMulNBits stores them."""
    each = 8 // bits
    out = np.zeros((levels.shape[0], levels.shape[1] // each), np.uint8)
    for part in range(each):
        out |= (levels[:, part::each] << (part * bits)).astype(np.uint8)
    return out


def multiply(variant: str, matrix: Matrix, bits: int, block: int, values: NDArray[np.float32]) -> NDArray[np.float32]:
    return multiplication(*matrix, bits, block, values).here(variant)


def drawn(seed: int, outputs: int, inputs: int, bits: int, block: int, scale_type: type) -> tuple[Matrix, NDArray[np.float64]]:
    """A random matrix, and the weights it stands for."""
    random = np.random.default_rng(seed)
    levels = random.integers(0, 1 << bits, (outputs, inputs)).astype(np.uint8)
    scales = random.standard_normal((outputs, inputs // block)).astype(scale_type).astype(np.float32)
    weights = (levels.astype(np.float64) - (1 << bits - 1)) * np.repeat(scales, block, axis=1)
    return (packed(levels, bits), scales), weights


def rounded(values: NDArray[np.float32], block: int) -> NDArray[np.float64]:
    """The activations after their rounding to int8 for each row and block."""
    blocks = values.reshape(len(values), -1, block)
    maximum = np.abs(blocks).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), maximum, out=np.zeros_like(maximum), where=maximum > 0)
    levels = np.rint((blocks * inverse).astype(np.float32))
    return (levels.astype(np.float64) * (maximum / np.float32(127)).astype(np.float64)).reshape(values.shape)


@pytest.mark.parametrize("scale_type", [np.float16, np.float32])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_variant_has_the_same_bits_for_a_row_in_any_batch(bits: int, block: int, scale_type: type) -> None:
    random = np.random.default_rng(bits * block)
    for seed, (outputs, blocks) in enumerate([*SHAPES, (37, LONG // block)]):
        matrix, weights = drawn(seed, outputs, blocks * block, bits, block, scale_type)
        values = random.standard_normal((BATCHES[-1], blocks * block)).astype(np.float32)
        values[3] = 0
        values[4] *= 1e-30
        expected = rounded(values, block) @ weights.T
        first = multiply(VARIANTS[0], matrix, bits, block, values)
        assert np.abs(first - expected).max() <= 1e-5 * np.abs(expected).max()
        for variant in VARIANTS:
            for count in BATCHES:
                assert np.array_equal(multiply(variant, matrix, bits, block, values[:count]), first[:count]), (variant, count, outputs)
            assert np.array_equal(multiply(variant, matrix, bits, block, values[7:8]), first[7:8]), variant


@pytest.mark.parametrize("output_scale", [0, 0.4])
@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_static_scales_add_integers_over_whole_rows(bits: int, block: int, output_scale: float) -> None:
    """Every result is the one rounding of an exact sum, with the least and the largest levels of both sides too."""
    random = np.random.default_rng(bits * block)
    steps = np.array([0.03, output_scale], np.float32)
    for outputs, blocks in [*SHAPES, (3, 2048 // block + 3)]:
        inputs = blocks * block
        levels = random.integers(0, 1 << bits, (outputs, inputs)).astype(np.uint8)
        levels[0] = 0
        scales = np.repeat(random.standard_normal((outputs, 1)).astype(np.float32) / 100, blocks, axis=1)
        values = random.standard_normal((BATCHES[-1], inputs)).astype(np.float32)
        values[2], values[3] = -99, np.where(random.random(inputs) < 0.5, -99, 99)
        rounded = np.clip(np.rint(values / steps[0]), -128, 127).astype(np.int64)
        sums = rounded @ (levels.astype(np.int64) - (1 << bits - 1)).T
        expected = sums.astype(np.float32) * (scales[:, 0] * steps[0])
        if output_scale:
            expected = np.clip(np.rint(expected / steps[1]), -128, 127) * steps[1]
        for variant in VARIANTS:
            for count in BATCHES:
                actual = static_multiplication(packed(levels, bits), scales, bits, block, steps, values[:count]).here(variant)
                assert np.array_equal(actual, expected[:count]), (variant, count, outputs)


def test_weights_without_one_scale_for_a_row_have_no_static_product() -> None:
    random = np.random.default_rng(0)
    (levels, scales), _ = drawn(0, 5, 64, 4, 32, np.float32)
    values, steps = random.standard_normal((1, 64)).astype(np.float32), np.array([0.1, 0], np.float32)
    static_multiplication(levels, scales[:, :1].repeat(2, axis=1), 4, 32, steps, values).here(VARIANTS[0])
    for wrong in ((scales, steps), (scales[:, :1].repeat(2, axis=1), -steps), (scales[:, :1].repeat(2, axis=1), 0 * steps)):
        with pytest.raises(ValueError, match="refused"):
            static_multiplication(levels, wrong[0], 4, 32, wrong[1], values).here(VARIANTS[0])


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_types_of_gguf_files_have_the_same_bits_for_a_row_in_any_batch(kind: int) -> None:
    gguf = pytest.importorskip("gguf", reason="needs edge-mtp[export]")
    random = np.random.default_rng(kind)
    for outputs, blocks in [*SHAPES, (37, LONG // 256 + 1)]:
        data = gguf_weights(random, kind, outputs, 256 * blocks)
        values = random.standard_normal((BATCHES[-1], 256 * blocks)).astype(np.float32)
        values[3] = 0
        values[4] *= 1e-30
        weights = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(kind)).astype(np.float64)
        expected = rounded(values, GGUF_BLOCKS[kind][0]) @ weights.T
        first = gguf_multiplication(kind, data, values).here(VARIANTS[0])
        assert np.abs(first - expected).max() <= 1e-5 * np.abs(expected).max()
        for variant in VARIANTS:
            for count in BATCHES:
                actual = gguf_multiplication(kind, data, values[:count]).here(variant)
                assert np.array_equal(actual, first[:count]), (variant, count, outputs)
            assert np.array_equal(gguf_multiplication(kind, data, values[7:8]).here(variant), first[7:8]), variant


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_largest_levels_and_activations_do_not_overflow(kind: int) -> None:
    """Levels and scales of all ones in every bit, by activations of one magnitude."""
    gguf = pytest.importorskip("gguf", reason="needs edge-mtp[export]")
    (each, size), halves = GGUF_BLOCKS[kind], HALVES[kind]
    data = np.full((16, size), 255, np.uint8)
    data[:, halves] = np.ones((halves.stop - halves.start) // 2, np.float16).view(np.uint8)
    values = np.ones((2, each), np.float32)
    values[1] = -1
    expected = values.astype(np.float64) @ gguf.quants.dequantize(data, gguf.GGMLQuantizationType(kind)).astype(np.float64).T
    for variant in VARIANTS:
        assert np.allclose(gguf_multiplication(kind, data, values).here(variant), expected, rtol=1e-6), variant


def static(values: NDArray[np.float32]) -> Call:
    (levels, scales), _ = drawn(0, 33, 512, 4, 32, np.float32)
    return static_multiplication(levels, scales[:, :1].repeat(16, axis=1), 4, 32, np.array([0.1, 0.5], np.float32), values)


def of_type(kind: int, values: NDArray[np.float32]) -> Call:
    return gguf_multiplication(kind, gguf_weights(np.random.default_rng(0), kind, 33, 512), values)


# Static scales clip what is infinite; Q5_1 has minimums, the K types super blocks.
NO_NUMBERS = [(product, value) for product in ("blocks", Q5_1, Q4_K, Q5_K, Q6_K) for value in (np.nan, -np.nan, np.inf, -np.inf)]


@pytest.mark.parametrize(("product", "value"), [*NO_NUMBERS, ("static", np.nan)])
def test_what_is_no_number_reaches_the_results_of_its_row_alone(product: str | int, value: float) -> None:
    """A broken model is recognised by NaN in its logits."""
    calls = {"blocks": lambda values: multiplication(*drawn(0, 33, 512, 4, 32, np.float16)[0], 4, 32, values), "static": static}
    call = calls.get(product, partial(of_type, product))
    values = np.random.default_rng(0).standard_normal((13, 512)).astype(np.float32)
    clean = call(values).here(VARIANTS[0])
    values[5, 300] = value
    for variant in VARIANTS:
        actual = call(values).here(variant)
        assert np.isnan(actual[5]).all(), variant
        assert np.array_equal(np.delete(actual, 5, axis=0), np.delete(clean, 5, axis=0)), variant


@pytest.mark.parametrize(
    ("outputs", "inputs", "bits", "block", "rows"),
    [
        (0, 32, 4, 32, 1),
        (-1, 32, 4, 32, 1),
        (1, 0, 4, 32, 1),
        (1, 48, 4, 32, 1),
        (1, 32, 3, 32, 1),
        (1, 32, 4, 8, 1),
        (1, 32, 4, 0, 1),
        (1 << 40, 32, 4, 32, 1),
        (1, 1 << 40, 4, 32, 1),
        (1, 32, 4, 32, 0),
        (1, 32, 4, 32, -5),
    ],
)
def test_shapes_no_kernel_takes_are_refused(outputs: int, inputs: int, bits: int, block: int, rows: int) -> None:
    assert KERNELS is not None
    byte = ctypes.create_string_buffer(64)
    sizes = ctypes.c_int64(outputs), ctypes.c_int64(inputs), bits, block
    assert KERNELS.edge_rows_multiply(VARIANTS[0].encode(), *sizes, byte, byte, byte, ctypes.c_int64(rows), byte) == 1


@pytest.mark.parametrize("change", [{0: 20}, {1: 0}, {2: 255}, {2: 128}, {2: 1 << 40}, {3: 1}, {3: 1 << 40}, {4: 0}])
def test_gguf_weights_no_kernel_takes_are_refused(change: dict[int, int]) -> None:
    call = gguf_multiplication(Q4_K, np.zeros((1, 144), np.uint8), np.zeros((1, 256), np.float32))
    sizes = tuple(change.get(place, size) for place, size in enumerate(call.sizes))
    assert not call.here(VARIANTS[0]).any()
    with pytest.raises(ValueError, match="refused"):
        replace(call, sizes=sizes).here(VARIANTS[0])


def test_the_variable_names_a_variant_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(loader.VARIABLE, raising=False)
    assert loader.variant() == VARIANTS[0]
    monkeypatch.setenv(loader.VARIABLE, VARIANTS[-1])
    assert loader.variant() == VARIANTS[-1]
    monkeypatch.setenv(loader.VARIABLE, "none")
    assert loader.variant() is None
    assert loader.kernels_path() is None


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
