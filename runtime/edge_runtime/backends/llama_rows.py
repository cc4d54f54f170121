"""Single rows of a tensor in a GGUF, read from the mapped file and dequantized by ggml itself: no copy of the table is made.

ggml's own functions are the ones llama.cpp looks rows up with (ggml/include/gguf.h, ggml_get_type_traits in ggml/include/ggml.h).
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.llama_library import LlamaLibrary
from edge_runtime.errors import BackendError

_F32 = 0


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


_ToFloat = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _TypeTraits(ctypes.Structure):
    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block_size", ctypes.c_int64),
        ("block_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", _ToFloat),
    )


class GgufRows:
    """The rows [count, width] of one tensor of a file that llama.cpp has loaded. Holds a mapping, which goes with the object."""

    def __init__(self, library: LlamaLibrary, path: Path, tensor: str, count: int, width: int) -> None:
        """Raises BackendError if the file has no such tensor, if it has another shape, or a type whose rows cannot be read alone."""
        kind, offset, size, found = _locate(_declared(library.ggml), path, tensor)
        if found != (width, count):
            raise BackendError(f"{path.name}: {tensor} has the shape {list(found)}, not {[width, count]}; export the pair again")
        traits = _traits(library.ggml, kind)
        self._row_bytes, rest = divmod(size, count)
        if rest or width % traits.block_size or self._row_bytes != width // traits.block_size * traits.type_size:
            raise BackendError(f"{path.name}: {tensor} has {size} bytes for {count} rows of ggml type {kind}; export the pair again")
        if kind != _F32 and not traits.to_float:
            raise BackendError(f"{path.name}: ggml cannot expand rows of the type {traits.type_name.decode()}; choose the dense drafter")
        if offset + size > path.stat().st_size:
            raise BackendError(f"{path.name} is truncated: {tensor} ends at byte {offset + size}; copy the bundle again")
        self._map = np.memmap(path, np.uint8, "r", offset, (size,))
        self._address = self._map.ctypes.data
        self._expand = None if kind == _F32 else traits.to_float
        self._width = width
        self._count = count

    def read(self, row: int, out: NDArray[np.float32]) -> None:
        """Writes row `row` as float32 into `out` [width], which is contiguous."""
        if not 0 <= row < self._count or out.shape != (self._width,):
            raise BackendError(f"row {row} into {out.shape} is not one of {self._count} rows of {self._width}; report this as a bug")
        source, destination = self._address + row * self._row_bytes, out.ctypes.data
        if self._expand is None:
            ctypes.memmove(destination, source, self._row_bytes)
        else:
            self._expand(source, destination, self._width)


def _declared(ggml: Any) -> Any:
    """Gives the functions their types; a wrong width would cut a pointer."""
    pointer, index = ctypes.c_void_p, ctypes.c_int64
    signatures = {
        "gguf_init_from_file": (pointer, [ctypes.c_char_p, _InitParams]),
        "gguf_free": (None, [pointer]),
        "gguf_find_tensor": (index, [pointer, ctypes.c_char_p]),
        "gguf_get_data_offset": (ctypes.c_size_t, [pointer]),
        "gguf_get_tensor_offset": (ctypes.c_size_t, [pointer, index]),
        "gguf_get_tensor_size": (ctypes.c_size_t, [pointer, index]),
        "gguf_get_tensor_type": (ctypes.c_int, [pointer, index]),
        "gguf_get_tensor_ne": (ctypes.POINTER(index), [pointer, index]),
        "ggml_get_type_traits": (ctypes.POINTER(_TypeTraits), [ctypes.c_int]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(ggml, name, None)
        if function is None:
            raise BackendError(f"this build of llama.cpp has no {name}, which the split drafter needs; choose the dense drafter")
        function.restype, function.argtypes = result, arguments
    return ggml


def _locate(ggml: Any, path: Path, tensor: str) -> tuple[int, int, int, tuple[int, int]]:
    """Returns a matrix's ggml type, first byte in the file, bytes, and (width, count)."""
    header = ggml.gguf_init_from_file(str(path).encode(), _InitParams(no_alloc=True, ctx=None))
    if not header:
        raise BackendError(f"ggml cannot read {path}; copy the bundle again")
    try:
        index: int = ggml.gguf_find_tensor(header, tensor.encode())
        if index < 0:
            raise BackendError(f"{path.name} has no tensor {tensor}; export the pair again")
        offset = ggml.gguf_get_data_offset(header) + ggml.gguf_get_tensor_offset(header, index)
        width, count = ggml.gguf_get_tensor_ne(header, index)[:2]
        return ggml.gguf_get_tensor_type(header, index), offset, ggml.gguf_get_tensor_size(header, index), (width, count)
    finally:
        ggml.gguf_free(header)


def _traits(ggml: Any, kind: int) -> Any:
    return ggml.ggml_get_type_traits(kind).contents
