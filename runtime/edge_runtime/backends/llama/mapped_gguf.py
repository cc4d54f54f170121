"""Tensors of a memory-mapped GGUF file: no copy is made, and pages that are not read take no memory.

The header is read by ggml itself (ggml/include/gguf.h), after our own reader has checked it; its offsets are checked against the file size
before any tensor is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.llama.loader import LlamaLibrary, declare
from edge_runtime.bundle.gguf_gemma4 import check_gguf
from edge_runtime.errors import BackendError

# Types that a matrix may have: those whose rows ggml expands and multiplies on every processor.
MATRIX_TYPES = (
    "f32",
    "f16",
    "bf16",
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "q2_K",
    "q3_K",
    "q4_K",
    "q5_K",
    "q6_K",
    "iq4_nl",
    "iq4_xs",
)
# enum gguf_type in ggml/include/gguf.h
_UINT32 = 4


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


class _TypeTraits(ctypes.Structure):
    """The beginning of ggml_type_traits in ggml/include/ggml.h."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block_size", ctypes.c_int64),
        ("block_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
    )


@dataclass(frozen=True, kw_only=True)
class MappedTensor:
    """One tensor: its ggml type number and the type's name, shape as ggml orders it (a row's length first), and its bytes in the map.

    `to_float` is the address of ggml's function that expands a row (ggml_to_float_t); None for float32.
    """

    kind: int
    type_name: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    to_float: int | None


@dataclass(frozen=True, kw_only=True)
class MappedGguf:
    """Some tensors of a file, by name, and some of its uint32 keys. The file stays mapped as long as one of them lives."""

    path: Path
    tensors: Mapping[str, MappedTensor]
    numbers: Mapping[str, int]

    def tensor(self, name: str, shape: tuple[int, ...], types: Sequence[str] = MATRIX_TYPES) -> MappedTensor:
        """Returns a tensor of this shape and of one of these types. Raises BackendError otherwise."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise BackendError(f"{self.path.name} has no tensor {name}; export the pair again")
        if tensor.shape != _stripped(shape):
            raise BackendError(f"{self.path.name}: {name} has the shape {list(tensor.shape)}, not {list(shape)}; export the pair again")
        if tensor.type_name not in types:
            raise BackendError(f"{self.path.name}: {name} is {tensor.type_name}, not {' or '.join(types)}; export the pair again")
        return tensor


def map_gguf(library: LlamaLibrary, path: Path, tensors: Sequence[str], numbers: Sequence[str] = ()) -> MappedGguf:
    """Maps `path` and finds those of `tensors` and uint32 keys `numbers` that it has.

    Raises BackendError if the file cannot be read, is no GGUF, or is shorter than its header requires.
    """
    ggml = declare(library.ggml, _SIGNATURES)
    check_gguf(path)
    header = ggml.gguf_init_from_file(str(path).encode(), _InitParams(no_alloc=True, ctx=None))
    if not header:
        raise BackendError(f"ggml cannot read {path}; export the bundle again")
    try:
        mapped = _mapped(path)
        places = {name: ggml.gguf_find_tensor(header, name.encode()) for name in tensors}
        mapped_tensors = {name: _tensor(ggml, header, path, mapped, place) for name, place in places.items() if place >= 0}
        keys = {name: ggml.gguf_find_key(header, name.encode()) for name in numbers}
        read = {name: ggml.gguf_get_val_u32(header, key) for name, key in keys.items() if _is_number(ggml, header, key)}
        return MappedGguf(path=path, tensors=mapped_tensors, numbers=read)
    finally:
        ggml.gguf_free(header)


def _mapped(path: Path) -> NDArray[np.uint8]:
    try:
        return np.memmap(path, np.uint8, "r")
    except OSError as error:  # also where address space lacks
        raise BackendError(f"{path} cannot be mapped ({error.strerror or error}); check the file, or free some memory") from error


def _stripped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """ggml gives every tensor four dimensions; trailing dimensions of 1 are dropped."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _is_number(ggml: Any, header: Any, key: int) -> bool:
    return key >= 0 and ggml.gguf_get_kv_type(header, key) == _UINT32


def _tensor(ggml: Any, header: Any, path: Path, mapped: NDArray[np.uint8], place: int) -> MappedTensor:
    name = ggml.gguf_get_tensor_name(header, place).decode("utf-8", "replace")
    kind: int = ggml.gguf_get_tensor_type(header, place)
    shape = _stripped(tuple(ggml.gguf_get_tensor_ne(header, place)[:4]))
    start: int = ggml.gguf_get_data_offset(header) + ggml.gguf_get_tensor_offset(header, place)
    size: int = ggml.gguf_get_tensor_size(header, place)
    traits = ggml.ggml_get_type_traits(kind).contents
    if shape[0] % traits.block_size or size != prod(shape) // traits.block_size * traits.type_size:
        raise BackendError(f"{path.name}: {name} has {size} bytes for {list(shape)} of ggml type {kind}; export the pair again")
    if start + size > len(mapped):
        raise BackendError(f"{path.name} is truncated: {name} ends at byte {start + size} of {len(mapped)}; copy the bundle again")
    return MappedTensor(
        kind=kind, type_name=traits.type_name.decode(), shape=shape, data=mapped[start : start + size], to_float=traits.to_float
    )


_INDEX, _POINTER = ctypes.c_int64, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "gguf_init_from_file": (_POINTER, [ctypes.c_char_p, _InitParams]),
    "gguf_free": (None, [_POINTER]),
    "gguf_find_key": (_INDEX, [_POINTER, ctypes.c_char_p]),
    "gguf_get_kv_type": (ctypes.c_int, [_POINTER, _INDEX]),
    "gguf_get_val_u32": (ctypes.c_uint32, [_POINTER, _INDEX]),
    "gguf_find_tensor": (_INDEX, [_POINTER, ctypes.c_char_p]),
    "gguf_get_data_offset": (ctypes.c_size_t, [_POINTER]),
    "gguf_get_tensor_name": (ctypes.c_char_p, [_POINTER, _INDEX]),
    "gguf_get_tensor_offset": (ctypes.c_size_t, [_POINTER, _INDEX]),
    "gguf_get_tensor_size": (ctypes.c_size_t, [_POINTER, _INDEX]),
    "gguf_get_tensor_type": (ctypes.c_int, [_POINTER, _INDEX]),
    "gguf_get_tensor_ne": (ctypes.POINTER(_INDEX), [_POINTER, _INDEX]),
    "ggml_get_type_traits": (ctypes.POINTER(_TypeTraits), [ctypes.c_int]),
}
