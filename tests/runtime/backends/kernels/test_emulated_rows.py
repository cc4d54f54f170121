"""The kernels for ARM, run by qemu, have the bits of this machine's: products of all kinds, attention, gates and tanh."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from draft_calls import one_draft
from edge_runtime.backends.kernels import loader
from emulated import QEMU
from fuzzing.random_drafter import MATRICES, ROW_UNITS, Sizes
from row_calls import (
    CELL_BLOCKS,
    GGUF_BLOCKS,
    Call,
    attention,
    cell_attention,
    cell_rows,
    float_multiplication,
    gate,
    gguf_multiplication,
    gguf_weights,
    multiplication,
    norm_of,
    static_multiplication,
    tanh_of,
)

pytest.importorskip("ziglang", reason="needs edge-mtp[export], which has the compiler")
if shutil.which(QEMU) is None:
    pytest.skip(f"needs {QEMU} (apt install qemu-user-static)", allow_module_level=True)
if not loader.usable_variants():
    pytest.skip("the row kernels were not built: pip install -e . builds them", allow_module_level=True)

from edge_runtime.backends.kernels.build import compile_objects, run_compiler

pytestmark = pytest.mark.slow(1)
TARGET = "aarch64-linux-gnu.2.17"
DRIVER = Path(__file__).parents[3] / "support" / "emulated_rows.cpp"
BATCHES = (1, 2, 3, 5, 8, 11, 12, 13, 29)
# Inputs that so many rows take in several parts.
MANY_INPUTS, MANY_ROWS = 2304, (7, 13, 27)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped kernels, without what engines see of them, and a program around them."""
    folder = tmp_path_factory.mktemp("arm")
    engines = ("onnxruntime/", "ggml/attention", "ggml/elementwise", "ggml/multiply", "ggml/re", "ggml/visible_cells")
    objects = compile_objects(TARGET, folder, without=("lost_files", "packed_file", "source_pages", *engines))
    flags = f"-target {TARGET} -mcpu=cortex_a53 -std=c++20 -O1 -ffreestanding -fno-sanitize=all -static -nostdlib -s".split()
    run_compiler([*flags, str(DRIVER), *objects, "-o", str(folder / "driver")], folder)
    return folder / "driver"


def products() -> Iterator[Call]:
    random = np.random.default_rng(1)
    for bits in (2, 4, 8):
        for block in (16, 32, 64, 128):
            for blocks, batches in ((3, BATCHES), (MANY_INPUTS // block, MANY_ROWS)):
                levels = random.integers(0, 256, (37, blocks * block * bits // 8)).astype(np.uint8)
                scales = random.standard_normal((37, blocks)).astype(np.float16 if block < 64 else np.float32).astype(np.float32)
                values = random.standard_normal((batches[-1], blocks * block)).astype(np.float32)
                yield from (multiplication(levels, scales, bits, block, values[:rows]) for rows in batches)
    for kind in GGUF_BLOCKS:
        for inputs, batches in ((768, BATCHES), (MANY_INPUTS, MANY_ROWS)):
            data, values = gguf_weights(random, kind, 37, inputs), random.standard_normal((batches[-1], inputs)).astype(np.float32)
            yield from (gguf_multiplication(kind, data, values[:rows]) for rows in batches)


def static_products() -> Iterator[Call]:
    random = np.random.default_rng(5)
    for bits in (2, 4, 8):
        for inputs, block in ((48, 16), (256, 128), (1312, 32)):
            levels = random.integers(0, 256, (37, inputs * bits // 8)).astype(np.uint8)
            levels[:2] = [[0], [255]]
            scales = np.repeat(random.standard_normal((37, 1)).astype(np.float32), inputs // block, axis=1)
            values = random.standard_normal((BATCHES[-1], inputs)).astype(np.float32)
            values[0] = -9
            for steps in ((0.02, 0.3), (0.05, 0)):
                yield from (static_multiplication(levels, scales, bits, block, np.float32(steps), values[:rows]) for rows in BATCHES)


def float_products() -> Iterator[Call]:
    random = np.random.default_rng(4)
    for inputs in (1, 16, 250):
        weights, values = (random.standard_normal((rows, inputs)).astype(np.float32) for rows in (9, BATCHES[-1]))
        for kind in (weights, weights.astype(np.float16), (weights.view(np.uint32) >> 16).astype(np.uint16)):
            yield from (float_multiplication(kind, values[:rows]) for rows in BATCHES)


def attentions() -> Iterator[Call]:
    random = np.random.default_rng(2)
    for past, rows, heads, dim, origin, window in [
        (0, 1, 1, 64, 0, 0),
        (1, 3, 4, 48, 0, 0),
        (127, 2, 2, 33, 0, 0),
        (300, 13, 8, 64, 0, 0),
        (200, 5, 2, 256, 77, 100),
        (129, 8, 1, 7, 5, 1),
    ]:
        queries, cached, fresh = ((random.standard_normal((count, dim)) * 2).astype(np.float32) for count in (rows * heads, past, rows))
        yield attention(queries, (cached, cached[::-1]), (fresh, fresh[::-1]), heads, origin, window)


def attentions_over_cells() -> Iterator[Call]:
    random = np.random.default_rng(3)
    for kind in CELL_BLOCKS:
        for rows, heads, cells, dim in [(1, 1, 1, 32), (1, 4, 70, 64), (3, 5, 33, 96), (4, 4, 300, 128)]:
            queries, keys, values = (random.standard_normal((count, dim)).astype(np.float32) for count in (rows * heads, cells, cells))
            mask = np.where(random.random((rows, cells)) < 0.3, -np.inf, 0).astype(np.float16)
            yield cell_attention(kind, queries, cell_rows(kind, keys), cell_rows(kind, values), mask)


def drafts() -> Iterator[Call]:
    for kind in MATRICES:
        for type_ in range(len(ROW_UNITS)):
            yield one_draft(kind, type_, Sizes(centroids=8 * (type_ % 2)))


def single_values() -> Iterator[Call]:
    values = np.linspace(-12, 12, 3001).astype(np.float32)
    yield gate(values, values[::-1])
    yield tanh_of(values)
    yield from (norm_of(values[:count], values[::-1][:count]) for count in (24, 256, 3001))


@pytest.mark.parametrize(("cpu", "variant"), [("cortex-a72", "neon"), ("cortex-a76", "dotprod"), ("max", "i8mm")])
@pytest.mark.parametrize("calls", [products, static_products, float_products, attentions, attentions_over_cells, single_values, drafts])
def test_arm_variants_have_the_bits_of_this_machine(driver: Path, cpu: str, variant: str, calls: type[Iterator[Call]]) -> None:
    made = list(calls())
    words = b"".join(call.written(variant) for call in made)
    ended = subprocess.run([QEMU, "-cpu", cpu, str(driver)], input=words, capture_output=True, timeout=300, check=True)
    expected = [call.here(loader.usable_variants()[0]) for call in made]
    assert len(ended.stdout) == sum(array.nbytes for array in expected)
    at = 0
    for call, array in zip(made, expected, strict=True):
        result = np.frombuffer(ended.stdout, np.float32, array.size, at).reshape(array.shape)
        assert np.array_equal(result, array), (call.function, call.sizes)
        at += array.nbytes


@pytest.mark.parametrize(("cpu", "variant"), [("cortex-a72", "dotprod"), ("cortex-a72", "i8mm"), ("cortex-a76", "i8mm")])
def test_a_processor_is_not_given_what_it_has_not(driver: Path, cpu: str, variant: str) -> None:
    call = next(products())
    ended = subprocess.run([QEMU, "-cpu", cpu, str(driver)], input=call.written(variant), capture_output=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout) == (2, b"")
