"""The kernels for ARM, run by qemu, have the bits of this machine's: products of all kinds, attention, gates and tanh."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.backends.kernels import loader
from edge_runtime.backends.kernels.draft import DraftWeights, NativeDraft, _described
from fuzzing.random_drafter import MATRICES, ROW_UNITS, RandomDrafters, Rows, Sizes
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
QEMU = "qemu-aarch64-static"
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
STEPS = 3
LINE, PIECE_BYTES = 64, 1 << 20


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


class Piece:
    """Memory in which arrays and structures lie one behind the other."""

    def __init__(self) -> None:
        self._whole = np.zeros(PIECE_BYTES + LINE, np.uint8)
        self.bytes = self._whole[-self._whole.ctypes.data % LINE :][:PIECE_BYTES]
        self.base = self.bytes.ctypes.data
        self._end = 0
        self.structures: list[slice] = []

    def take(self, size: int) -> slice:
        """The next bytes, from a line on."""
        start = self._end
        self._end = start + -(-size // LINE) * LINE
        assert self._end <= PIECE_BYTES
        return slice(start, start + size)

    def place(self, array: NDArray[Any]) -> NDArray[Any]:
        """A copy in it."""
        copy = self.bytes[self.take(array.nbytes)].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    def structure(self, of: Any) -> int:
        """Copies a structure; returns where it lies."""
        at = self.take(ctypes.sizeof(of))
        self.bytes[at] = np.frombuffer(bytes(of), np.uint8)
        self.structures.append(at)
        return at.start

    def addresses(self) -> NDArray[np.int64]:
        """Where addresses stand, which then count from the beginning."""
        places = []
        for at in self.structures:
            words = self.bytes[at].view(np.int64)
            inside = np.flatnonzero((words >= self.base) & (words < self.base + PIECE_BYTES))
            words[inside] -= self.base
            places += [at.start + 8 * int(place) for place in inside]
        return np.array(places, np.int64)


@dataclass(frozen=True)
class DraftCall(Call):
    """A draft; its result float32 [2, STEPS] are tokens and their probabilities."""

    weights: DraftWeights
    rows: tuple[Rows, ...]
    hidden: NDArray[np.float32]

    def here(self, variant: str) -> NDArray[np.float32]:
        draft, shares = NativeDraft(self.weights, longest=STEPS, name=variant), list[float]()
        for place, rows in enumerate(self.rows):
            rows.describe(draft, place)
        tokens = draft.run(1, STEPS, self.hidden, None, lambda share: shares.append(share) or True)  # type: ignore[func-returns-value]
        draft.close()
        return np.array([tokens, shares], np.float32)


def one_draft(kind: str, type_: int, sizes: Sizes) -> DraftCall:
    """A draft with random weights of this kind, on K/V rows of that type."""

    def made(makes: RandomDrafters) -> tuple[DraftWeights, tuple[Rows, ...], NDArray[np.float32]]:
        weights = makes.weights(sizes, kind)
        rows = tuple(makes.rows(type_, heads, dim, 140, listed=True) for heads, dim in zip(sizes.kv_heads, sizes.dims, strict=True))
        return weights, rows, makes.place(makes.random.standard_normal(sizes.target).astype(np.float32))

    piece = Piece()
    shape_place = piece.take(4096)
    weights, rows, hidden = made(RandomDrafters(np.random.default_rng(type_), piece.place))
    draft = NativeDraft(weights, longest=STEPS)
    for place, source in enumerate(rows):
        source.describe(draft, place)
    shape = _described(weights, len(rows))
    shape.layer = piece.base + piece.structure(shape._layers)
    piece.bytes[shape_place][: ctypes.sizeof(shape)] = np.frombuffer(bytes(shape), np.uint8)
    piece.structures.append(slice(shape_place.start, shape_place.start + ctypes.sizeof(shape)))
    tokens, probabilities = piece.take(8 * STEPS).start, piece.take(4 * STEPS).start
    call = draft._call
    call.token, call.steps, call.hidden = 1, STEPS, hidden.ctypes.data
    call.sources = piece.base + piece.structure(draft.sources)
    call.tokens, call.probabilities = piece.base + tokens, piece.base + probabilities
    call_place = piece.structure(call)
    addresses = piece.addresses()
    draft.close()
    numbers = call_place, tokens, probabilities, len(addresses), STEPS
    return DraftCall("draft", numbers, (piece.bytes.copy(), addresses), (2, STEPS), *made(RandomDrafters(np.random.default_rng(type_))))


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
