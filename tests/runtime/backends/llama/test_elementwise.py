"""GELU gates and tanh inside llama.cpp: right numbers, and the same bits with any number of threads and rows."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

from edge_runtime.backends.kernels import ggml
from edge_runtime.backends.kernels.loader import usable_variants
from edge_runtime.backends.llama.loader import llama_library
from row_calls import gate, tanh_of

pytestmark = pytest.mark.skipif(llama_library().row_kernels is None, reason=f"stock kernels run: {llama_library().stock_reason}")
F32, MEMORY = 0, 32 << 20
Array = NDArray[np.float32]


class Parameters(ctypes.Structure):
    """struct ggml_init_params"""

    _fields_ = (("size", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def function(name: str, *kinds: Any, returns: Any = ctypes.c_void_p) -> Any:
    actual = getattr(llama_library().api._lib, name)  # with the libraries that it was loaded with
    actual.argtypes, actual.restype = kinds, returns
    return actual


@pytest.fixture
def context() -> Iterator[int]:
    made = function("ggml_init", Parameters)(Parameters(MEMORY, None, False))
    ggml.switch(True)
    yield made
    function("ggml_free", ctypes.c_void_p, returns=None)(made)


def tensor(context: int, values: Array, padding: int = 0) -> int:
    """Values [rows, columns] in rows that are `padding` values longer."""
    rows, columns = values.shape
    size = ctypes.c_int64
    whole = function("ggml_new_tensor_2d", ctypes.c_void_p, ctypes.c_int, size, size)(context, F32, columns + padding, rows)
    data = function("ggml_get_data_f32", ctypes.c_void_p)(whole)
    memory = (ctypes.c_float * (rows * (columns + padding))).from_address(data)
    np.frombuffer(memory, np.float32).reshape(rows, -1)[:, :columns] = values
    kinds = ctypes.c_void_p, ctypes.c_void_p, size, size, ctypes.c_size_t, ctypes.c_size_t
    made: int = function("ggml_view_2d", *kinds)(context, whole, columns, rows, (columns + padding) * 4, 0)
    return made


def computed(context: int, operation: str, sources: list[int], threads: int, shape: tuple[int, int]) -> Array:
    result = function(operation, *[ctypes.c_void_p] * (1 + len(sources)))(context, *sources)
    graph = function("ggml_new_graph", ctypes.c_void_p)(context)
    function("ggml_build_forward_expand", ctypes.c_void_p, ctypes.c_void_p, returns=None)(graph, result)
    function("ggml_graph_compute_with_ctx", *[ctypes.c_void_p] * 2, ctypes.c_int, returns=ctypes.c_int)(context, graph, threads)
    data = function("ggml_get_data_f32", ctypes.c_void_p)(result)
    return np.frombuffer((ctypes.c_float * (shape[0] * shape[1])).from_address(data), np.float32).reshape(shape).copy()


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 33, 640])
@pytest.mark.parametrize("rows", [1, 3])
def test_gates_and_tanh_have_the_kernels_bits_with_any_number_of_threads(context: int, rows: int, columns: int) -> None:
    random = np.random.default_rng(columns)
    gates, values = (4 * random.standard_normal((2, rows, columns))).astype(np.float32)
    both = np.concatenate([gates, values], axis=1)
    variant = usable_variants()[0]
    expected, capped = (made.here(variant).reshape(rows, columns) for made in (gate(gates.ravel(), values.ravel()), tanh_of(gates.ravel())))
    turned = gate(values.ravel(), gates.ravel()).here(variant).reshape(rows, columns)
    for threads in (1, 2, 5):
        for padding in (0, 3):
            item, other, joined = (tensor(context, each, padding) for each in (gates, values, both))
            shape = rows, columns
            assert np.array_equal(computed(context, "ggml_geglu_split", [item, other], threads, shape), expected)
            assert np.array_equal(computed(context, "ggml_geglu", [joined], threads, shape), expected)
            assert np.array_equal(computed(context, "ggml_geglu_swapped", [joined], threads, shape), turned)
        assert np.array_equal(computed(context, "ggml_tanh", [tensor(context, gates)], threads, (rows, columns)), capped)


def test_numbers_are_those_of_llama_cpp_up_to_its_table(context: int) -> None:
    gates, values = np.random.default_rng(1).standard_normal((2, 4, 200)).astype(np.float32)
    sources = [tensor(context, each) for each in (gates, values)]
    ours = computed(context, "ggml_geglu_split", sources, 2, (4, 200))
    ggml.switch(False)
    stock = computed(context, "ggml_geglu_split", sources, 2, (4, 200))
    ggml.switch(True)
    assert not np.array_equal(ours, stock)
    np.testing.assert_allclose(ours, stock, atol=5e-3)
