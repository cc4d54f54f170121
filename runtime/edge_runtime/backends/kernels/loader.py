"""The compiled kernels: where they lie, which variant this processor runs, how arrays are passed; and the race of shared noise in them."""

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

# Names a variant ("avx2"), or is "none": then the stock operators run.
VARIABLE = "EDGE_MTP_KERNELS"
FOLDER = Path(__file__).parent / "lib"
# A released wheel has the libraries of several systems: each has its system and processor in its name (build.py, `library_name`).
NAME = f"libedge_rows-{platform.system().lower()}-{platform.machine()}{'.dylib' if platform.system() == 'Darwin' else '.so'}"
_NAMES_BYTES = 256
# Kept: C holds its address.
_LOST_FILE = ctypes.c_char_p(
    b"Error: a file of the model became shorter, or its disk failed, while it was in use; do not write to files of a bundle that runs,"
    b" put new ones in their place\n"
)


def kernels_path() -> Path | None:
    """Returns the compiled library; None where there is none, no variant for this processor, or it is switched off."""
    return FOLDER / NAME if variant() is not None else None


def variant() -> str | None:
    """Returns the name of the variant in use, such as "avx512vnni"; None where the stock operators run."""
    requested = os.environ.get(VARIABLE, "")
    usable = usable_variants()
    if requested:
        return requested if requested in usable else None
    return usable[0] if usable else None


def stock_reason() -> str | None:
    """Returns why the stock operators run, as a sentence; None where a variant does."""
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
    """Returns the SHA-256 of the compiled library, "" where there is none."""
    path = kernels_path()
    return "" if path is None else sha256_of(path)


@cache
def usable_variants() -> tuple[str, ...]:
    """Returns the variants that this processor can run, best first; none where no library was built."""
    library = load_library()
    if library is None:
        return ()
    names = ctypes.create_string_buffer(_NAMES_BYTES)
    library.edge_rows_variants(names, ctypes.c_size_t(_NAMES_BYTES))
    return tuple(names.value.decode("ascii").split())


@cache
def load_library() -> ctypes.CDLL | None:
    """Returns the loaded library, or None where there is none for this system."""
    path = FOLDER / NAME
    try:
        return ctypes.CDLL(str(path)) if path.is_file() else None
    except OSError:  # built for another processor or C library
        return None


def end_on_lost_files() -> None:
    """Ends this process with one sentence instead of SIGBUS if a mapped file was cut or its disk failed.

    Does nothing if the program handles that signal itself, or if no kernels were built.
    """
    library = load_library()
    if library is not None and hasattr(library, "edge_end_on_lost_file"):  # an earlier build has it not
        library.edge_end_on_lost_file(_LOST_FILE)


# Converts NumPy arrays to addresses for native code, which reads memory unchecked; done only here.


def handed(array: NDArray[Any], kind: DTypeLike, size: int, *, more: bool = False) -> int:
    """Returns where the elements lie of an array that native code reads or writes; whoever calls keeps it alive meanwhile.

    Raises ValueError unless they lie one behind the other as their type demands, which is this one, and are `size` in number, or `more`.
    """
    fits = array.dtype == kind and (array.size == size or (more and array.size > size))
    if not (fits and array.flags.c_contiguous and array.flags.aligned):
        raise ValueError(f"an array of {array.size} {array.dtype} in the place of {size} {np.dtype(kind)}")
    if array.flags.writeable and array.size:  # in a quarter of the time that the array's interface takes
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    return int(array.__array_interface__["data"][0])


# The race of shared noise in native code: the same choices as `decoding.shared_noise` makes with NumPy, sooner.


class NativeRace:
    """Chooses the winners of races. Implements `decoding.shared_noise.Race`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._some, self._all = library.edge_race, library.edge_race_of_all
        self._some.restype = self._all.restype = ctypes.c_int64
        self._some.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        self._all.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_double]

    def choose(self, key: int, tokens: NDArray[np.int64], weights: NDArray[np.float64]) -> int:
        """As `PlaceNoise.choose`."""
        count = len(tokens)
        at = self._some(key, handed(tokens, np.int64, count), handed(weights, np.float64, count), count)
        return int(tokens[at])

    def choose_of_all(self, key: int, logits: NDArray[np.float32], temperature: float) -> int:
        """As `PlaceNoise.choose_of_all`. Raises MemoryError."""
        token: int = self._all(key, handed(logits, np.float32, len(logits)), len(logits), temperature)
        if token < 0:
            raise MemoryError
        return token


@cache
def native_race() -> NativeRace | None:
    """Returns it; None where no library runs, or an earlier build of it, which has no race."""
    library = load_library() if variant() is not None else None
    return NativeRace(library) if library is not None and hasattr(library, "edge_race") else None
