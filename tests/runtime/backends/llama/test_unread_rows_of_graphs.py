"""Random graphs of ggml in which rows are chosen at the end: results have the bits of computing all rows, whoever else reads some.

All memory holds NaN before a graph is computed: an operation that takes in a row which was not computed shows in a result.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

from edge_runtime.backends.llama.loader import declare, llama_library
from row_calls import unread_rows

pytestmark = pytest.mark.skipif(llama_library().row_kernels is None, reason=f"stock kernels run: {llama_library().stock_reason}")
HEADS, DIM, CELLS = 4, 8, 16
WIDTH = HEADS * DIM
HIDDEN = 64
# enum ggml_type, enum ggml_backend_buffer_usage, enum ggml_op_hint, GGML_ROPE_TYPE_NEOX
F32, F16, Q4_0, I32 = 0, 1, 2, 26
WEIGHTS, HADAMARD, NEOX = 1, 1, 2
LOGITS = b"result_output"
# For the tensors of a graph, and the graph, without what they hold.
DESCRIBED_BYTES = 1 << 20
_P, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


# ggml/include/ggml.h, ggml-alloc.h and ggml-backend.h
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (_P, [InitParams]),
    "ggml_free": (None, [_P]),
    "ggml_new_graph": (_P, [_P]),
    "ggml_build_forward_expand": (None, [_P, _P]),
    "ggml_new_tensor": (_P, [_P, _INT, _INT, _P]),
    "ggml_get_data": (_P, [_P]),
    "ggml_nbytes": (ctypes.c_size_t, [_P]),
    "ggml_set_name": (_P, [_P, ctypes.c_char_p]),
    "ggml_set_output": (None, [_P]),
    "ggml_add": (_P, [_P] * 3),
    "ggml_mul": (_P, [_P] * 3),
    "ggml_mul_mat": (_P, [_P] * 3),
    "ggml_mul_mat_set_hint": (None, [_P, _INT]),
    "ggml_get_rows": (_P, [_P] * 3),
    "ggml_geglu_split": (_P, [_P] * 3),
    "ggml_rms_norm": (_P, [_P, _P, _FLOAT]),
    "ggml_scale": (_P, [_P, _P, _FLOAT]),
    "ggml_gelu": (_P, [_P, _P]),
    "ggml_tanh": (_P, [_P, _P]),
    "ggml_soft_max": (_P, [_P, _P]),
    "ggml_sum_rows": (_P, [_P, _P]),
    "ggml_cont": (_P, [_P, _P]),
    "ggml_reshape_2d": (_P, [_P, _P, _LONG, _LONG]),
    "ggml_reshape_3d": (_P, [_P, _P, _LONG, _LONG, _LONG]),
    "ggml_permute": (_P, [_P, _P, _INT, _INT, _INT, _INT]),
    "ggml_rope": (_P, [_P, _P, _P, _INT, _INT]),
    "ggml_flash_attn_ext": (_P, [_P] * 5 + [_FLOAT] * 3),
    "ggml_backend_alloc_ctx_tensors": (_P, [_P, _P]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, [_P, _P]),
    "ggml_backend_tensor_set": (None, [_P, _P, ctypes.c_size_t, ctypes.c_size_t]),
    "ggml_backend_buffer_clear": (None, [_P, ctypes.c_uint8]),
    "ggml_backend_buffer_set_usage": (None, [_P, _INT]),
    "ggml_backend_buffer_free": (None, [_P]),
    "ggml_backend_dev_init": (_P, [_P, ctypes.c_char_p]),
    "ggml_backend_graph_compute": (_INT, [_P, _P]),
    "ggml_backend_free": (None, [_P]),
}
REGISTRY_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_backend_cpu_reg": (_P, []),
    "ggml_backend_reg_dev_get": (_P, [_P, ctypes.c_size_t]),
    "ggml_backend_reg_get_proc_address": (_P, [_P, ctypes.c_char_p]),
}


def processor() -> tuple[Any, Callable[..., Any]]:
    """ggml's CPU device, and what gives a function of its registry by result type, argument types and name."""
    library = declare(llama_library().api._lib, REGISTRY_SIGNATURES)
    registry = library.ggml_backend_cpu_reg()

    def function(result: Any, arguments: list[Any], name: bytes) -> Any:
        return ctypes.CFUNCTYPE(result, *arguments)(library.ggml_backend_reg_get_proc_address(registry, name))

    return _P(library.ggml_backend_reg_dev_get(registry, 0)), function


class Graph:
    """A random graph over rows [WIDTH, batch], of which `read` are chosen at its end. Not `joined`: each product is computed as floats."""

    def __init__(self, seed: int, logits: bytes, *, joined: bool = True) -> None:
        self._random, self._numbers = random.Random(seed), np.random.default_rng(seed)
        self._ggml = declare(llama_library().ggml, SIGNATURES)
        described = InitParams(mem_size=DESCRIBED_BYTES, mem_buffer=None, no_alloc=True)
        self._context, self._weights, self._packed = (self._ggml.ggml_init(described) for _ in range(3))
        self._joined_products = joined
        self._filled: list[tuple[Any, NDArray[Any]]] = []
        self.batch = self._random.randint(1, 20)
        self.read = sorted(self._random.sample(range(self.batch), self._random.choice([0, 1, self._random.randint(0, self.batch)])))
        self._matrix = self._filling(self._weights, (WIDTH, WIDTH), np.float32)
        self._scale = self._filling(self._weights, (WIDTH,), np.float32)
        self._matrices = [self._packed_matrix(*shape) for shape in ((HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))]
        self._positions = self._leaf(self._context, I32, np.arange(self.batch, dtype=np.int32))
        self._cells = [self._filling(self._context, (DIM, CELLS, HEADS), np.float16) for _ in range(2)]
        self._mask = self._leaf(self._context, F16, np.zeros((self.batch, CELLS), np.float16))
        hadamard = np.ones((1, 1), np.float32)
        while len(hadamard) < DIM:
            hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
        self._hadamard = self._leaf(self._context, F32, hadamard.astype(np.float32) / np.float32(DIM**0.5))
        self._build(logits)

    def results(self) -> list[NDArray[np.float32]]:
        """Computes the graph and returns what it is for: what was chosen, and what reads all rows. Frees everything."""
        ggml, (device, function) = self._ggml, processor()
        backend = ggml.ggml_backend_dev_init(device, None)
        buffers = [ggml.ggml_backend_alloc_ctx_tensors(context, backend) for context in (self._context, self._weights)]
        for buffer in buffers:
            ggml.ggml_backend_buffer_clear(buffer, 0xFF)
        # The kernels' buffer type: the first extra one of the CPU.
        packed_type = function(ctypes.POINTER(_P), [_P], b"ggml_backend_dev_get_extra_bufts")(device)[0]
        buffers.append(ggml.ggml_backend_alloc_ctx_tensors_from_buft(self._packed, packed_type))
        for buffer in buffers[1:]:
            ggml.ggml_backend_buffer_set_usage(buffer, WEIGHTS)
        for tensor, data in self._matrices:
            ggml.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)
        for tensor, values in self._filled:
            if values.size:
                ctypes.memmove(ggml.ggml_get_data(tensor), np.ascontiguousarray(values).ctypes.data, values.nbytes)
        function(None, [_P, _INT], b"ggml_backend_set_n_threads")(backend, self._random.randint(1, 3))
        assert ggml.ggml_backend_graph_compute(backend, self._graph) == 0
        results = [self._values(tensor) for tensor in self._results]
        for buffer in buffers:
            ggml.ggml_backend_buffer_free(buffer)
        ggml.ggml_backend_free(backend)
        for context in (self._context, self._weights, self._packed):
            ggml.ggml_free(context)
        return results

    def _values(self, tensor: Any) -> NDArray[np.float32]:
        size = self._ggml.ggml_nbytes(tensor)
        if not size:
            return np.zeros(0, np.float32)
        return np.frombuffer((ctypes.c_uint8 * size).from_address(self._ggml.ggml_get_data(tensor)), np.float32).copy()

    def _leaf(self, context: Any, kind: int, values: NDArray[Any]) -> Any:
        shape = values.shape[::-1]
        tensor = self._ggml.ggml_new_tensor(context, kind, len(shape), (ctypes.c_int64 * len(shape))(*shape))
        self._filled.append((tensor, values))
        return tensor

    def _packed_matrix(self, outputs: int, inputs: int) -> tuple[Any, NDArray[np.uint8]]:
        """A matrix in q4_0, of small scales, and its bytes in a file."""
        blocks = self._numbers.integers(0, 256, (outputs, inputs // 32, 18)).astype(np.uint8)
        blocks[..., :2] = np.float16([0.02]).view(np.uint8)
        return self._ggml.ggml_new_tensor(self._packed, Q4_0, 2, (ctypes.c_int64 * 2)(inputs, outputs)), blocks

    def _filling(self, context: Any, shape: tuple[int, ...], kind: type[Any]) -> Any:
        values = self._numbers.standard_normal(shape[::-1]) / WIDTH**0.5
        return self._leaf(context, F16 if kind is np.float16 else F32, values.astype(kind))

    def _build(self, logits: bytes) -> None:
        draw, call = self._random, self._call
        rows = [call("scale", self._filling(self._context, (WIDTH, self.batch), np.float32), 1.5)]
        self._results = []
        for _ in range(draw.randint(2, 14)):
            step: Callable[[Any], Any] = draw.choice(
                [
                    *(self._norm, self._product, self._gated, self._turned, self._transformed, self._attended, self._permuted),
                    *(self._single, self._fed_forward, self._fed_forward),
                ]
            )
            rows.append(step(draw.choice(rows[-3:])))
            if draw.random() < 0.5:
                rows.append(call("add", rows[-1], draw.choice(rows)))
            if draw.random() < 0.08:
                self._results.append(call("sum_rows", draw.choice(rows)))
            if draw.random() < 0.04:
                self._ggml.ggml_set_output(draw.choice(rows[1:] or rows))
        ids = self._leaf(self._context, I32, np.asarray(self.read, np.int32))
        chosen = [call("get_rows", item, ids) for item in (rows[-1], draw.choice(rows))]
        last = call("mul_mat", self._matrix, call("add", *chosen))
        self._ggml.ggml_set_name(last, logits)
        self._ggml.ggml_set_output(last)
        self._results.append(last)
        self._graph = self._ggml.ggml_new_graph(self._context)
        for result in self._results:
            self._ggml.ggml_build_forward_expand(self._graph, result)

    def _call(self, name: str, *arguments: Any) -> Any:
        return getattr(self._ggml, f"ggml_{name}")(self._context, *arguments)

    def _norm(self, rows: Any) -> Any:
        normed = self._call("rms_norm", rows, 1e-6)
        return self._call("mul", normed, self._scale) if self._random.random() < 0.8 else normed

    def _product(self, rows: Any) -> Any:
        return self._call("mul_mat", self._matrix, rows)

    def _gated(self, rows: Any) -> Any:
        return self._call("geglu_split", self._product(rows), rows)

    def _fed_forward(self, rows: Any) -> Any:
        (gate, _), (up, _), (down, _) = self._matrices
        gates, values = self._call("mul_mat", gate, rows), self._call("mul_mat", up, rows)
        hidden = self._call("geglu_split", gates, values)
        if not self._joined_products:
            self._ggml.ggml_set_output(gates)
        if self._random.random() < 0.2:
            self._results.append(self._call("sum_rows", self._random.choice([gates, values, hidden])))
        return self._call("mul_mat", down, hidden)

    def _single(self, rows: Any) -> Any:
        name = self._random.choice(["gelu", "tanh", "soft_max", "scale"])
        return self._call(name, rows, 0.7) if name == "scale" else self._call(name, rows)

    def _heads(self, rows: Any) -> Any:
        return self._call("reshape_3d", rows, DIM, HEADS, self.batch)

    def _joined(self, heads: Any) -> Any:
        return self._call("reshape_2d", heads, WIDTH, self.batch)

    def _turned(self, rows: Any) -> Any:
        return self._joined(self._call("rope", self._heads(rows), self._positions, DIM, NEOX))

    def _transformed(self, rows: Any) -> Any:
        product = self._call("mul_mat", self._hadamard, self._call("reshape_2d", self._heads(rows), DIM, HEADS * self.batch))
        self._ggml.ggml_mul_mat_set_hint(product, HADAMARD)
        return self._joined(product)

    def _attended(self, rows: Any) -> Any:
        queries = self._call("permute", self._heads(rows), 0, 2, 1, 3)
        return self._joined(self._call("flash_attn_ext", queries, *self._cells, self._mask, 0.5, 0.0, 0.0))

    def _permuted(self, rows: Any) -> Any:
        by_head = self._call("cont", self._call("permute", self._heads(rows), 0, 2, 1, 3))
        return self._joined(self._call("cont", self._call("permute", by_head, 0, 2, 1, 3)))


@pytest.mark.parametrize("part", range(5))
def test_results_of_random_graphs_have_the_bits_of_all_rows_and_of_each_product_alone(part: int) -> None:
    left_out = 0
    for seed in range(part * 40, part * 40 + 40):
        before = unread_rows()
        expected = Graph(seed, b"another name", joined=False).results()
        assert unread_rows() == before
        actual = Graph(seed, LOGITS).results()
        left_out += unread_rows() - before
        for item, other in zip(expected, actual, strict=True):
            assert not np.isnan(item).any(), seed
            assert np.array_equal(item, other), seed
    assert left_out > 300
