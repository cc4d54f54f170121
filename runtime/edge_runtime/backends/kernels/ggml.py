"""Adds the kernels to ggml's CPU backend, as an extra buffer type that packs weights when they are loaded and multiplies with them.

This needs no patch to llama.cpp, because libggml-cpu exports its list of such buffer types as a C++ symbol. The structures behind it are no
stable interface: src/ggml/facts.h describes those of the one release of llama-cpp-python that the runtime is pinned to.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.kernels.draft import KvSource
from edge_runtime.backends.kernels.loader import address_of, load_library, stock_reason

# The order is that of struct Functions in src/ggml/facts.h.
FUNCTIONS = (
    "ggml_backend_buffer_init",
    "ggml_nbytes",
    "ggml_backend_buft_is_host",
    "ggml_op_name",
    "ggml_unary_op_name",
    "ggml_glu_op_name",
    "ggml_type_name",
    "ggml_backend_cpu_reg",
    "ggml_backend_reg_dev_get",
    "_Z39ggml_backend_cpu_get_extra_buffer_typesv",
    "ggml_barrier",
    "ggml_threadpool_chunk_set",
    "ggml_threadpool_chunk_add",
    *(f"ggml_compute_forward_{operation}" for operation in ("add", "mul", "rms_norm", "scale", "cont", "rope", "unary", "fwht")),
)
# C++'s operator new: the list of buffer types is a std::vector, which may free the memory that we allocate for it.
_NEW = "_Znwm"
_switched_on = True


def register(llama: Any) -> str | None:
    """Adds the buffer type to the loaded libllama. Returns None, or a sentence that says why the stock kernels are used instead.

    Must be called before the first model is loaded. `llama` is the ctypes library; symbols of its dependencies, ggml's libraries, are
    found through it.
    """
    kernels, reason = _kernels(), stock_reason()
    if kernels is None or reason is not None:
        return reason
    missing = [name for name in (*FUNCTIONS, _NEW) if not hasattr(llama, name)]
    if missing:
        return f"this build of llama.cpp does not export {', '.join(missing)}"
    functions = (ctypes.c_void_p * len(FUNCTIONS))(*(_address(llama, name) for name in FUNCTIONS))
    kernels.edge_ggml_register.restype = ctypes.c_char_p
    refusal = kernels.edge_ggml_register(functions, ctypes.c_void_p(_address(llama, _NEW)))
    return f"this build of llama.cpp is another than the one supported: {refusal.decode('ascii')}" if refusal else None


def switch(enabled: bool) -> None:
    """Switches the kernels on or off: for models that are loaded from now on, and for the attention of all models.

    Initially they are on. A model that was loaded with the kernels cannot run while they are off.
    """
    global _switched_on
    _switched_on = enabled
    kernels = _kernels()
    if kernels is not None:
        kernels.edge_ggml_switch(int(enabled))


def is_switched_on() -> bool:
    """Whether the kernels are switched on."""
    return _switched_on


def failure_check() -> Any:
    """Returns a C function (ggml_abort_callback) that says if an operation failed since its last call; None without the kernels."""
    return getattr(_kernels(), "edge_ggml_failed", None)


@dataclass
class VisibleCells:
    """The KV cells that a row attends to, in each watched layer: `sources` describe their memory, `cells` int32 lists their numbers."""

    sources: Any
    cells: tuple[NDArray[np.int32], ...]


class CellWatch:
    """Records which cells of llama.cpp's KV cache the flagged rows of a forward attend to, in two layers (src/ggml/visible_cells.h)."""

    def __init__(self, layers: tuple[int, int], max_cells: int) -> None:
        """`layers` are numbers of the target's layers; `max_cells` is the most cells that a layer has."""
        self._kernels: Any = _kernels()
        self._kernels.edge_ggml_watch_new.restype = ctypes.c_void_p
        self._kernels.edge_ggml_watch_cells.restype = ctypes.c_int64
        self._max_cells = max_cells
        self._pointer: Any = ctypes.c_void_p(self._kernels.edge_ggml_watch_new(*map(ctypes.c_int64, layers)))
        if not self._pointer:
            raise MemoryError

    def begin(self, flags: NDArray[np.int8], count: int) -> None:
        """Watches this thread's next forward, until `end` is called. The first `count` of `flags` say which of its rows are flagged."""
        self._kernels.edge_ggml_watch(self._pointer, ctypes.c_void_p(address_of(flags[:count], np.int8, count)), ctypes.c_int64(count))

    def end(self) -> None:
        """Stops watching."""
        self._kernels.edge_ggml_watch(None, None, ctypes.c_int64(0))

    def room(self) -> VisibleCells:
        """Allocates memory for the result of `visible`."""
        return VisibleCells((KvSource * 2)(), tuple(np.zeros(self._max_cells, np.int32) for _ in range(2)))

    def visible(self, row: int, to: VisibleCells) -> bool:
        """Writes into `to` the cells that flagged row number `row` of the newest forward attends to; returns whether they are known."""
        watched, count, sources = self._kernels.edge_ggml_watch_cells, self._max_cells, to.sources
        return all(
            watched(self._pointer, layer, row, ctypes.byref(sources[layer]), ctypes.c_void_p(address_of(cells, np.int32, count)), count) > 0
            for layer, cells in enumerate(to.cells)
        )

    def close(self) -> None:
        """Frees the watch. Can be called twice."""
        if self._pointer is not None:
            self._kernels.edge_ggml_watch_free(self._pointer)
            self._pointer = None


def _kernels() -> Any:
    """Returns the library; None if it is missing, or an older build, which expects other functions."""
    kernels = load_library()
    return kernels if hasattr(kernels, "edge_ggml_watch_cells") else None


def _address(library: Any, name: str) -> int | None:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
