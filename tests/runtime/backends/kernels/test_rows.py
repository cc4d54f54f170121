"""The row kernels: right numbers, and each row's bits the same whatever else is in its batch, on every variant this processor can run."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.backends.kernels import library

KERNELS = library.load_library()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="the row kernels were not built: pip install -e . builds them")
VARIANTS = library.usable_variants()
# Tails of a tile, one block, several blocks, more tiles than a register group.
SHAPES = [(1, 1), (5, 1), (16, 2), (33, 3), (100, 4), (257, 2)]
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
    levels, scales = matrix
    outputs, inputs = levels.shape[0], levels.shape[1] * 8 // bits
    out = np.full((len(values), outputs), np.nan, np.float32)
    values = np.ascontiguousarray(values)
    assert KERNELS is not None
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (levels, scales, values, out)]
    sizes = ctypes.c_int64(outputs), ctypes.c_int64(inputs), bits, block
    failed = KERNELS.edge_rows_multiply(variant.encode(), *sizes, *pointers[:3], ctypes.c_int64(len(values)), pointers[3])
    assert failed == 0
    return out


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
    most = np.abs(blocks).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    levels = np.rint((blocks * inverse).astype(np.float32))
    return (levels.astype(np.float64) * (most / np.float32(127)).astype(np.float64)).reshape(values.shape)


@pytest.mark.parametrize("scale_type", [np.float16, np.float32])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_variant_has_the_same_bits_for_a_row_in_any_batch(bits: int, block: int, scale_type: type) -> None:
    random = np.random.default_rng(bits * block)
    for seed, (outputs, blocks) in enumerate(SHAPES):
        matrix, weights = drawn(seed, outputs, blocks * block, bits, block, scale_type)
        values = random.standard_normal((BATCHES[-1], blocks * block)).astype(np.float32)
        values[3] = 0
        values[4] *= 1e-30
        wanted = rounded(values, block) @ weights.T
        first = multiply(VARIANTS[0], matrix, bits, block, values)
        assert np.abs(first - wanted).max() <= 1e-5 * np.abs(wanted).max()
        for variant in VARIANTS:
            for count in BATCHES:
                assert np.array_equal(multiply(variant, matrix, bits, block, values[:count]), first[:count]), (variant, count, outputs)
            assert np.array_equal(multiply(variant, matrix, bits, block, values[7:8]), first[7:8]), variant


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_no_number_reaches_the_results_of_its_row_alone(value: float) -> None:
    """A broken model is recognised by NaN in its logits."""
    matrix, _ = drawn(0, 33, 3 * 32, 4, 32, np.float16)
    values = np.random.default_rng(0).standard_normal((13, 3 * 32)).astype(np.float32)
    clean = multiply(VARIANTS[0], matrix, 4, 32, values)
    values[5, 40] = value
    for variant in VARIANTS:
        found = multiply(variant, matrix, 4, 32, values)
        assert np.isnan(found[5]).all(), variant
        assert np.array_equal(np.delete(found, 5, axis=0), np.delete(clean, 5, axis=0)), variant


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


def test_the_variable_names_a_variant_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.VARIABLE, raising=False)
    assert library.variant() == VARIANTS[0]
    monkeypatch.setenv(library.VARIABLE, VARIANTS[-1])
    assert library.variant() == VARIANTS[-1]
    monkeypatch.setenv(library.VARIABLE, "none")
    assert library.variant() is None
    assert library.library_path() is None
