"""Small graphs of ggml's own operations (ggml/include/ggml.h, ggml-backend.h, ggml-alloc.h)."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.llama.loader import LlamaLibrary, declare
from edge_runtime.errors import BackendError

Tensor = Any
Graph = Any

# enum ggml_backend_dev_type, enum ggml_status
_CPU = 0
_SUCCESS = 0
_MAX_TENSORS, _MAX_GRAPHS = 64, 8


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class GgmlContext:
    """Tensors, and graphs over them, on the processor. `close` frees all, buffers that were added too."""

    def __init__(self, library: LlamaLibrary) -> None:
        """Raises BackendError if this build of ggml lacks something or memory runs out."""
        self._ggml = declare(library.ggml, _SIGNATURES)
        devices = declare(
            library.api.load_shared_library("ggml", library.api._base_path),
            {"ggml_backend_init_by_type": (_POINTER, [ctypes.c_int, ctypes.c_char_p])},
        )
        self._buffers: list[Any] = []
        size = _MAX_TENSORS * self._ggml.ggml_tensor_overhead() + _MAX_GRAPHS * self._ggml.ggml_graph_overhead()
        self._context: Any = self._ggml.ggml_init(_InitParams(mem_size=size, mem_buffer=None, no_alloc=True))
        self._backend: Any = devices.ggml_backend_init_by_type(_CPU, None)
        if not self._context or not self._backend:
            self.close()
            raise BackendError("ggml could not be started on this processor")

    def graph(self, *results: Tensor) -> Graph:
        """What computes `results` and all they depend on."""
        graph = self._ggml.ggml_new_graph(self._context)
        for result in results:
            self._ggml.ggml_build_forward_expand(graph, result)
        return graph

    def array(self, tensor: Tensor, count: int) -> NDArray[np.float32]:
        """A view [count] of an allocated tensor's memory, dead after `close`."""
        address = self._ggml.ggml_get_data(tensor)
        raw = (ctypes.c_uint8 * (count * 4)).from_address(address)
        return np.frombuffer(memoryview(raw), np.float32)

    def compute(self, graph: Graph) -> None:
        """Computes a graph."""
        if self._ggml.ggml_backend_graph_compute(self._backend, graph) != _SUCCESS:
            raise BackendError("ggml failed on a graph")

    def close(self) -> None:
        """Frees tensors and graphs. Harmless when done twice."""
        while self._buffers:
            self._ggml.ggml_backend_buffer_free(self._buffers.pop())
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


_POINTER = ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (_POINTER, [_InitParams]),
    "ggml_free": (None, [_POINTER]),
    "ggml_tensor_overhead": (ctypes.c_size_t, []),
    "ggml_graph_overhead": (ctypes.c_size_t, []),
    "ggml_new_graph": (_POINTER, [_POINTER]),
    "ggml_build_forward_expand": (None, [_POINTER, _POINTER]),
    "ggml_get_data": (_POINTER, [_POINTER]),
    "ggml_backend_buffer_free": (None, [_POINTER]),
    "ggml_backend_graph_compute": (ctypes.c_int, [_POINTER, _POINTER]),
    "ggml_backend_free": (None, [_POINTER]),
    "ggml_backend_get_device": (_POINTER, [_POINTER]),
    "ggml_backend_dev_backend_reg": (_POINTER, [_POINTER]),
    "ggml_backend_reg_get_proc_address": (_POINTER, [_POINTER, ctypes.c_char_p]),
}
