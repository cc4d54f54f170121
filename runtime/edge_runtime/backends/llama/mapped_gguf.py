"""Tensors of a memory-mapped GGUF file: no copy is made, and pages that are not read take no memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.llama.loader import LlamaLibrary, declare
from edge_runtime.bundle.gguf_gemma4 import check_gguf
from edge_runtime.bundle.gguf_types import TENSOR_TYPES
from edge_runtime.errors import BackendError

# Types that a matrix may have: those whose rows ggml expands and multiplies on every processor.
_FLOATS, _SIMPLE = ("f32", "f16", "bf16"), ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "iq4_xs")
MATRIX_TYPES = (*_FLOATS, *_SIMPLE, "q2_K", "q3_K", "q4_K", "q5_K", "q6_K")


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


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {"ggml_get_type_traits": (ctypes.POINTER(_TypeTraits), [ctypes.c_int])}


@dataclass(frozen=True, kw_only=True)
class MappedTensor:
    """One tensor: its ggml type number, shape as ggml orders it (a row's length first), and its bytes in the map."""

    kind: int
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def row_reader(self, library: LlamaLibrary) -> int | None:
        """Returns the address of ggml's function that expands a row (ggml_to_float_t); None for float32."""
        address: int | None = declare(library.ggml, _SIGNATURES).ggml_get_type_traits(self.kind).contents.to_float
        return address


class MappedGguf:
    """A mapped file with its header. It stays mapped as long as one of its tensors lives."""

    def __init__(self, path: Path) -> None:
        """Raises BackendError if the file cannot be read, is no GGUF, or is shorter than its header requires."""
        self.path, self.header = path, check_gguf(path)
        self._places = {info.name: info for info in self.header.tensors}
        try:
            self._mapped = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:  # also where address space lacks; an empty file is no OSError
            why = getattr(error, "strerror", None) or error
            raise BackendError(f"{path} cannot be mapped ({why}); check the file, or free some memory") from error
        if len(self._mapped) < max((info.offset + info.bytes for info in self.header.tensors), default=0):
            raise BackendError(f"{path} was cut while it was opened; check the file")

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape without trailing dimensions of 1; empty if there is none of that name."""
        return _stripped(self._places[name].shape) if name in self._places else ()

    def tensor(self, name: str, shape: tuple[int, ...], types: Sequence[str] | None = MATRIX_TYPES) -> MappedTensor:
        """Returns a tensor of this shape and of one of these types, None for any. Raises BackendError otherwise."""
        info = self._places.get(name)
        if info is None:
            raise BackendError(f"{self.path.name} has no tensor {name}; export the pair again")
        if self.shape(name) != _stripped(shape):
            raise BackendError(f"{self.path.name}: {name} has the shape {list(self.shape(name))}, not {list(shape)}; export the pair again")
        if types is not None and (kind := TENSOR_TYPES[info.type].name) not in types:
            raise BackendError(f"{self.path.name}: {name} is {kind}, not {' or '.join(types)}; export the pair again")
        return MappedTensor(kind=info.type, shape=self.shape(name), data=self._mapped[info.offset : info.offset + info.bytes])


def _stripped(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
