"""Arrays that end where a page begins that cannot be touched: a byte read or written behind one ends the process. Linux only."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from edge_runtime.backends.kernels import loader

_LIBC = ctypes.CDLL(None, use_errno=True)
_kept: list[mmap.mmap] = []


def guarded(shape: tuple[int, ...], kind: DTypeLike) -> NDArray[np.generic]:
    """An array of zeros whose last byte is the last one before a page that cannot be touched; it is there until `forget`."""
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    pages = -(-size // mmap.PAGESIZE) + 1
    memory = mmap.mmap(-1, pages * mmap.PAGESIZE)
    _kept.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    end = start + (pages - 1) * mmap.PAGESIZE
    if _LIBC.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    return np.frombuffer(memory, kind, int(np.prod(shape)), (pages - 1) * mmap.PAGESIZE - size).reshape(shape)


def filled(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """A guarded copy."""
    copy = guarded(values.shape, values.dtype)
    copy[...] = values
    return copy


def pointer(array: NDArray[np.generic]) -> ctypes.c_void_p:
    """The address of the first element."""
    return ctypes.c_void_p(array.ctypes.data)


def forget() -> None:
    """Frees all guarded arrays that nobody uses."""
    _kept.clear()


@contextmanager
def guarded_arrays() -> Iterator[None]:
    """Meanwhile native code gets guarded copies of all arrays that it is handed, and what it writes stays in these.

    Whatever reads beyond an array that passed the checks then ends the process.
    """
    checked = loader.address_of

    def address_of(array: NDArray[Any], kind: DTypeLike, size: int, *, more: bool = False) -> int:
        checked(array, kind, size, more=more)
        return int(filled(array).ctypes.data)

    modules = [module for module in list(sys.modules.values()) if getattr(module, "address_of", None) is checked]
    for module in modules:
        module.address_of = address_of  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.address_of = checked  # type: ignore[attr-defined]
        forget()
