"""The kernels inside ggml's CPU backend: an extra buffer type that packs weights when they are loaded and multiplies with them.

No patch to llama.cpp: libggml-cpu exports the list of such buffer types as a C++ symbol. Structures behind it are no stable interface;
src/ggml/facts.h has those of the one release of llama-cpp-python that the runtime is pinned to.
"""

from __future__ import annotations

import ctypes
from typing import Any

from edge_runtime.backends.kernels.loader import VARIABLE, load_library, variant

# In the order of struct Functions in src/ggml/facts.h.
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
# C++'s operator new: the list belongs to a vector, which may free it.
_NEW = "_Znwm"


def register(llama: Any) -> str | None:
    """Adds the buffer type to the loaded libllama. Returns None, or a sentence that says why stock kernels multiply.

    Must come before the first model is loaded. `llama` is the ctypes library: its dependencies, ggml's libraries, are searched with it.
    """
    kernels = _kernels()
    if kernels is None:
        return "the row kernels were not built for this machine"
    if variant() is None:
        return f"no row kernel runs on this processor, or ${VARIABLE} switches them off"
    missing = [name for name in (*FUNCTIONS, _NEW) if not hasattr(llama, name)]
    if missing:
        return f"this build of llama.cpp does not export {', '.join(missing)}"
    functions = (ctypes.c_void_p * len(FUNCTIONS))(*(_address(llama, name) for name in FUNCTIONS))
    kernels.edge_ggml_register.restype = ctypes.c_char_p
    reason = kernels.edge_ggml_register(functions, ctypes.c_void_p(_address(llama, _NEW)))
    return f"this build of llama.cpp is another than the one supported: {reason.decode('ascii')}" if reason else None


def switch(enabled: bool) -> None:
    """Whether models that are loaded from now on get the kernels, and attention of all models; registering switches them on.

    Models that were loaded with the kernels do not run while they are off.
    """
    kernels = _kernels()
    if kernels is not None:
        kernels.edge_ggml_switch(int(enabled))


def failure_check() -> Any:
    """The C function (ggml_abort_callback) that returns whether an operation failed since its last call; None without the kernels."""
    return getattr(_kernels(), "edge_ggml_failed", None)


def unread_rows() -> int:
    """Returns how many rows of products this process did not compute so far, as nobody reads them; 0 without kernels."""
    kernels = _kernels()
    if kernels is None:
        return 0
    kernels.edge_ggml_unread_rows.restype = ctypes.c_int64
    count: int = kernels.edge_ggml_unread_rows()
    return count


def _kernels() -> Any:
    """The library; None where there is none, or one of an earlier build, which would take other functions."""
    kernels = load_library()
    return kernels if hasattr(kernels, "edge_ggml_unread_rows") else None


def _address(library: Any, name: str) -> int | None:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
