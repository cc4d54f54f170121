"""Small graphs of ggml's own operations over mapped weights.

Graphs are built once and computed again and again. All vectors have memory of their own, which numpy looks at (ggml/include/ggml.h,
ggml-backend.h, ggml-alloc.h).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.llama.loader import LlamaLibrary, declare
from edge_runtime.backends.llama.mapped_gguf import MappedTensor
from edge_runtime.errors import BackendError

Tensor = Any
Graph = Any

# enum ggml_type, enum ggml_backend_dev_type, enum ggml_status
_F32, _I32 = 0, 26
_CPU = 0
_SUCCESS = 0
_MAX_TENSORS, _MAX_GRAPHS = 64, 8


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class GgmlContext:
    """Tensors, and graphs over them, on the processor. Make tensors, then `allocate`, then compute; `close` frees all."""

    def __init__(self, library: LlamaLibrary) -> None:
        """Raises BackendError if this build of ggml lacks something or memory runs out."""
        self._ggml = declare(library.ggml, _SIGNATURES)
        devices = declare(
            library.api.load_shared_library("ggml", library.api._base_path),
            {"ggml_backend_init_by_type": (_POINTER, [ctypes.c_int, ctypes.c_char_p])},
        )
        self._maps: list[NDArray[np.uint8]] = []
        self._buffers: list[Any] = []
        size = _MAX_TENSORS * self._ggml.ggml_tensor_overhead() + _MAX_GRAPHS * self._ggml.ggml_graph_overhead()
        self._context: Any = self._ggml.ggml_init(_InitParams(mem_size=size, mem_buffer=None, no_alloc=True))
        self._backend: Any = devices.ggml_backend_init_by_type(_CPU, None)
        if not self._context or not self._backend:
            self.close()
            raise BackendError("ggml could not be started on this processor")

    def mapped(self, tensor: MappedTensor) -> Tensor:
        """A tensor whose values lie in a mapped file."""
        sizes = (ctypes.c_int64 * len(tensor.shape))(*tensor.shape)
        made = self._ggml.ggml_new_tensor(self._context, tensor.kind, len(tensor.shape), sizes)
        # ggml wants whole buffers aligned, which a tensor in a file need not be; from the page that it begins in they are.
        address = tensor.data.ctypes.data
        lead = address % _PAGE
        buffer = self._ggml.ggml_backend_cpu_buffer_from_ptr(address - lead, lead + tensor.data.nbytes)
        self._buffers.append(buffer)
        self._maps.append(tensor.data)
        self._check(self._ggml.ggml_backend_tensor_alloc(buffer, made, address), "map weights")
        return made

    def numbers(self, count: int) -> Tensor:
        """An int32 vector to be filled through `array`."""
        return self._ggml.ggml_new_tensor_1d(self._context, _I32, count)

    def row(self, table: Tensor, index: Tensor) -> Tensor:
        """Row `index` [1] of a table as float32. An index outside the table aborts the process: check it before."""
        return self._ggml.ggml_get_rows(self._context, table, index)

    def graph(self, *results: Tensor) -> Graph:
        """What computes `results` and all they depend on."""
        graph = self._ggml.ggml_new_graph(self._context)
        for result in results:
            self._ggml.ggml_build_forward_expand(graph, result)
        return graph

    def allocate(self) -> None:
        """Gives memory to every tensor that is not mapped."""
        buffer = self._ggml.ggml_backend_alloc_ctx_tensors(self._context, self._backend)
        if not buffer:
            raise BackendError("no memory for the graph's vectors")
        self._buffers.append(buffer)

    def array(self, tensor: Tensor, count: int, kind: type[np.float32] | type[np.int32] = np.float32) -> NDArray[Any]:
        """A view [count] of an allocated tensor's memory, dead after `close`."""
        address = self._ggml.ggml_get_data(tensor)
        raw = (ctypes.c_uint8 * (count * 4)).from_address(address)
        view: NDArray[Any] = np.frombuffer(memoryview(raw), kind)
        return view

    def compute(self, graph: Graph) -> None:
        """Computes a graph."""
        if self._ggml.ggml_backend_graph_compute(self._backend, graph) != _SUCCESS:
            raise BackendError("ggml failed on a graph")

    def close(self) -> None:
        """Frees tensors and graphs; mapped files stay as long as someone holds them. Harmless when done twice."""
        while self._buffers:
            self._ggml.ggml_backend_buffer_free(self._buffers.pop())
        self._maps.clear()
        if self._backend:
            self._ggml.ggml_backend_free(self._backend)
            self._backend = None
        if self._context:
            self._ggml.ggml_free(self._context)
            self._context = None

    def set_threads(self, threads: int) -> None:
        """Sets the number of threads."""
        ggml = self._ggml
        registry = ggml.ggml_backend_dev_backend_reg(ggml.ggml_backend_get_device(self._backend))
        address = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
        if address:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(address)(self._backend, threads)

    def _check(self, status: int, what: str) -> None:
        if status != _SUCCESS:
            raise BackendError(f"ggml could not {what} (status {status})")


# Buffers begin at a multiple of ggml's TENSOR_ALIGNMENT, which is less.
_PAGE = 4096
_POINTER = ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (_POINTER, [_InitParams]),
    "ggml_free": (None, [_POINTER]),
    "ggml_tensor_overhead": (ctypes.c_size_t, []),
    "ggml_graph_overhead": (ctypes.c_size_t, []),
    "ggml_new_tensor": (_POINTER, [_POINTER, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64)]),
    "ggml_new_tensor_1d": (_POINTER, [_POINTER, ctypes.c_int, ctypes.c_int64]),
    "ggml_get_rows": (_POINTER, [_POINTER] * 3),
    "ggml_new_graph": (_POINTER, [_POINTER]),
    "ggml_build_forward_expand": (None, [_POINTER, _POINTER]),
    "ggml_get_data": (_POINTER, [_POINTER]),
    "ggml_backend_alloc_ctx_tensors": (_POINTER, [_POINTER, _POINTER]),
    "ggml_backend_cpu_buffer_from_ptr": (_POINTER, [_POINTER, ctypes.c_size_t]),
    "ggml_backend_tensor_alloc": (ctypes.c_int, [_POINTER] * 3),
    "ggml_backend_buffer_free": (None, [_POINTER]),
    "ggml_backend_graph_compute": (ctypes.c_int, [_POINTER, _POINTER]),
    "ggml_backend_free": (None, [_POINTER]),
    "ggml_backend_get_device": (_POINTER, [_POINTER]),
    "ggml_backend_dev_backend_reg": (_POINTER, [_POINTER]),
    "ggml_backend_reg_get_proc_address": (_POINTER, [_POINTER, ctypes.c_char_p]),
}
