"""Loads the compiled kernels: finds the library, chooses the variant for this processor, passes arrays to it; and the shared-noise race."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from edge_devices.files.limited_read import sha256_of

# An environment variable that names a variant ("avx2"), or is "none" to run the engine's stock operators.
VARIABLE = "EDGE_MTP_KERNELS"
FOLDER = Path(__file__).parent / "lib"
# A released wheel contains the libraries of several systems, so their names state system and processor (build.py, `library_name`).
NAME = f"libedge_rows-{platform.system().lower()}-{platform.machine()}{'.dylib' if platform.system() == 'Darwin' else '.so'}"
_NAMES_BYTES = 256
# A global, because C keeps its address.
_LOST_FILE = ctypes.c_char_p(
    b"Error: a file of the model became shorter, or its disk failed, while it was in use; do not write to files of a bundle that runs,"
    b" put new ones in their place\n"
)


def kernels_path() -> Path | None:
    """Returns the path of the compiled library; None if it is missing, has no variant for this processor, or is switched off."""
    return FOLDER / NAME if variant() is not None else None


def variant() -> str | None:
    """Returns the name of the variant in use, such as "avx512vnni"; None if the stock operators are used."""
    requested = os.environ.get(VARIABLE, "")
    usable = usable_variants()
    if requested:
        return requested if requested in usable else None
    return usable[0] if usable else None


def stock_reason() -> str | None:
    """Returns a sentence that says why the stock operators are used; None if a variant is."""
    if variant() is not None:
        return None
    if os.environ.get(VARIABLE) == "none":
        return f"${VARIABLE} switches the row kernels off"
    if not (FOLDER / NAME).is_file():
        return "there are no row kernels in this installation"
    if load_library() is None:
        return f"{NAME} does not load on this system"
    if not usable_variants():
        return "no row kernel runs on this processor"
    return f"${VARIABLE}={os.environ[VARIABLE]} is none of {', '.join(usable_variants())}"


def build_hash() -> str:
    """Returns the SHA-256 of the compiled library in use, or ""."""
    path = kernels_path()
    return "" if path is None else sha256_of(path)


@cache
def usable_variants() -> tuple[str, ...]:
    """Returns the variants that this processor can run, best first; empty if no library was built."""
    library = load_library()
    if library is None:
        return ()
    names = ctypes.create_string_buffer(_NAMES_BYTES)
    library.edge_rows_variants(names, ctypes.c_size_t(_NAMES_BYTES))
    return tuple(names.value.decode("ascii").split())


@cache
def load_library() -> ctypes.CDLL | None:
    """Returns the loaded library, or None if there is none for this system."""
    path = FOLDER / NAME
    try:
        return ctypes.CDLL(str(path)) if path.is_file() else None
    except OSError:  # built for another processor or C library
        return None


def end_on_lost_files() -> None:
    """Makes this process end with one sentence, instead of SIGBUS, if a mapped file is truncated or its disk fails.

    Does nothing if the program handles that signal itself, or if no kernels were built.
    """
    library = load_library()
    if library is not None and hasattr(library, "edge_end_on_lost_file"):  # an older build lacks it
        library.edge_end_on_lost_file(_LOST_FILE)


# Native code reads memory unchecked, so NumPy arrays are checked and converted to addresses here only.


def address_of(array: NDArray[Any], kind: DTypeLike, size: int, *, more: bool = False) -> int:
    """Returns the address of an array's elements, for native code that reads or writes them. The caller keeps the array alive.

    Raises ValueError unless the array is contiguous and aligned, of dtype `kind`, and has `size` elements, or at least that if `more`.
    """
    fits = array.dtype == kind and (array.size == size or (more and array.size > size))
    if not (fits and array.flags.c_contiguous and array.flags.aligned):
        raise ValueError(f"an array of {array.size} {array.dtype} in the place of {size} {np.dtype(kind)}")
    if array.flags.writeable and array.size:  # takes a quarter of the time of `__array_interface__`
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    return int(array.__array_interface__["data"][0])


# The race of shared noise in native code: it makes the same choices as the NumPy code of `decoding.shared_noise`, faster.


class NativeRace:
    """Chooses the winner of a race. Implements `decoding.shared_noise.Race`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._some, self._all = library.edge_race, library.edge_race_of_all
        self._some.restype = self._all.restype = ctypes.c_int64
        self._some.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        self._all.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_double]

    def choose(self, key: int, tokens: NDArray[np.int64], weights: NDArray[np.float64]) -> int:
        """See `PlaceNoise.choose`."""
        count = len(tokens)
        at = self._some(key, address_of(tokens, np.int64, count), address_of(weights, np.float64, count), count)
        return int(tokens[at])

    def choose_of_all(self, key: int, logits: NDArray[np.float32], temperature: float) -> int:
        """See `PlaceNoise.choose_of_all`. Raises MemoryError."""
        token: int = self._all(key, address_of(logits, np.float32, len(logits)), len(logits), temperature)
        if token < 0:
            raise MemoryError
        return token


@cache
def native_race() -> NativeRace | None:
    """Returns the native race; None if the library is missing, switched off, or an older build without it."""
    library = load_library() if variant() is not None else None
    return NativeRace(library) if library is not None and hasattr(library, "edge_race") else None
