"""The row kernels inside llama.cpp: a row has the same bits alone and in any batch; hostile sizes are refused."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from kept import shipped_bundle

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

from edge_runtime.backends.kernels import ggml
from edge_runtime.backends.kernels.loader import VARIABLE, load_library
from edge_runtime.backends.llama.context import LlamaOptions
from edge_runtime.backends.llama.loader import llama_library
from edge_runtime.backends.llama.target import LlamaTarget
from edge_runtime.bundle.gguf_header import TENSOR_TYPES
from row_calls import GGUF_BLOCKS

KERNELS = load_library()
built = pytest.mark.skipif(llama_library().row_kernels is None, reason=f"stock kernels run: {llama_library().stock_reason}")
# enum ggml_type
F32, F16, IQ4_NL, BF16 = 0, 1, 20, 30
PROMPT = 540  # beyond 512 rows llama.cpp would divide the attention of a single row among threads


class Tensor(ctypes.Structure):
    """struct ggml_tensor as far as packing reads it."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("rest", ctypes.c_char * 512),
    )


@pytest.fixture(scope="module", params=["q4_0", "q4_k_m", "q5_k_m", "f16", "bf16"])
def any_target(request: pytest.FixtureRequest) -> Path:
    """The shipped target; in 4 bits the head and one projection are q6_K and bf16. Float weights are multiplied where they lie."""
    pytest.importorskip("gguf", reason="needs edge-mtp[export]")
    return next(shipped_bundle(target_quantization=request.param).glob("target-*.gguf"))


@pytest.fixture(autouse=True)
def switched_on() -> Iterator[None]:
    yield
    ggml.switch(True)


def logits(path: Path, batches: tuple[int, ...], *, kernels: bool, threads: int = 1) -> list[NDArray[np.float32]]:
    """The logits of each batch after the same prompt."""
    ggml.switch(kernels)
    # Stock kernels without repacked weights: among them are AMX's, which crash on virtual machines that only advertise it.
    with LlamaTarget(path, LlamaOptions(context=600, threads=threads, draft=False, use_extra_bufts=kernels)) as target:
        tokens = np.random.default_rng(3).integers(50, target.vocabulary.size, PROMPT + 16).tolist()
        target.prefill(tokens[:PROMPT])
        result = []
        for rows in batches:
            result.append(target.verify(tokens[PROMPT : PROMPT + rows]).copy())
            target.rollback(PROMPT)
        return result


@built
def test_a_row_has_the_same_bits_in_every_batch_and_on_any_number_of_threads(any_target: Path) -> None:
    all_rows, *batches = logits(any_target, (13, 1, 2, 3, 5, 8, 12), kernels=True)
    for batch in batches:
        assert np.array_equal(batch, all_rows[: len(batch)]), len(batch)
    assert np.array_equal(logits(any_target, (13,), kernels=True, threads=2)[0], all_rows)


def mapped_bytes(path: Path) -> int:
    """How much of a file lies in this process's memory, by its mappings."""
    inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            inside = words[-1] == str(path.resolve())
        elif inside and words[0] == "Rss:":
            total += int(words[1]) * 1024
    return total


@built
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux's pages are given back")
@pytest.mark.parametrize("quantization", ["q4_0", "q4_k_m"])
def test_the_files_pages_do_not_stay_beside_the_packed_weights(quantization: str) -> None:
    pytest.importorskip("gguf", reason="needs edge-mtp[export]")
    path = next(shipped_bundle(target_quantization=quantization).glob("target-*.gguf"))
    kept = []
    for kernels in (False, True):
        ggml.switch(kernels)
        before = mapped_bytes(path)  # by targets of other tests
        with LlamaTarget(path, LlamaOptions(context=64, threads=1, draft=False, use_extra_bufts=kernels)) as target:
            target.prefill([50, 51, 52])
            kept.append(mapped_bytes(path) - before)
    assert kept[1] < kept[0] / 3, kept


@built
def test_numbers_are_near_those_of_the_stock_kernels(any_target: Path) -> None:
    ours, stock = logits(any_target, (4,), kernels=True)[0], logits(any_target, (4,), kernels=False)[0]
    assert not np.array_equal(ours, stock)
    assert np.abs(ours - stock).max() < 0.1 * np.abs(stock).max()


@built
@pytest.mark.parametrize("quantization", ["q4_0", "q4_k_m", "q5_k_m", "f16"])
def test_a_row_of_a_mixture_of_experts_has_the_same_bits_alone(quantization: str) -> None:
    """The router is float32, which llama.cpp's own kernels add up in another order for one row than for several.

    The widths are no multiples of 256: mixes fall back to q5_0, q5_1 and q8_0.
    """
    pytest.importorskip("torch", reason="needs edge-mtp[verify]")
    from random_pairs import kept_bundle

    pair, bundle = kept_bundle(3, target_quantization=quantization)
    assert pair.target["enable_moe_block"]
    all_rows, *batches = logits(next(bundle.glob("target-*.gguf")), (13, 1, 2, 3, 5, 8, 12), kernels=True)
    for batch in batches:
        assert np.array_equal(batch, all_rows[: len(batch)]), len(batch)


def packed_bytes(kind: int, inputs: int, outputs: int, *, stride: int | None = None, planes: int = 1) -> int:
    assert KERNELS is not None
    KERNELS.edge_ggml_packed_bytes.restype = ctypes.c_size_t
    each, size = GGUF_BLOCKS.get(kind, (32, 18))
    bytes_of_row = inputs // each * size if stride is None else stride
    tensor = Tensor(type=kind, ne=(inputs, outputs, planes, 1), nb=(size, bytes_of_row % 2**64, 0, 0))
    result: int = KERNELS.edge_ggml_packed_bytes(ctypes.byref(tensor))
    return result


@built
@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_packed_weights_need_what_a_plan_counts_and_whole_tiles(kind: int) -> None:
    assert packed_bytes(kind, 512, 64) == 512 * 64 // TENSOR_TYPES[kind].weights * TENSOR_TYPES[kind].copy_bytes
    assert packed_bytes(kind, 512, 65) > packed_bytes(kind, 512, 64)


@built
@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_sizes_that_no_kernel_takes_stay_with_llama_cpp(kind: int) -> None:
    assert packed_bytes(kind, 256, 16) > 0
    for inputs, outputs in [(0, 16), (256, 0), (-256, 16), (256, -16), (24, 16), (1 << 32, 16), (256, 1 << 40), (1 << 30, 1 << 30)]:
        assert packed_bytes(kind, inputs, outputs) == 0, (inputs, outputs)
    assert packed_bytes(kind, 256, 16, stride=1 << 40) == 0
    assert packed_bytes(kind, 256, 16, planes=2) == 0


@built
@pytest.mark.parametrize("kind", [F32, F16, BF16, IQ4_NL, 99, -1])
def test_other_types_are_not_packed(kind: int) -> None:
    assert packed_bytes(kind, 256, 16) == 0


@built
def test_a_library_without_the_symbols_keeps_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not export ggml_backend_buffer_init, " in (ggml.register(SimpleNamespace(ggml_nbytes=1)) or "")
    monkeypatch.setenv(VARIABLE, "none")
    assert ggml.register(SimpleNamespace()) == f"${VARIABLE} switches the row kernels off"
