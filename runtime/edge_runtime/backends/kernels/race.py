"""The race of shared noise in native code: the same choices as `decoding.shared_noise`, in a tenth of the time."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.kernels.arrays import handed
from edge_runtime.backends.kernels.loader import load_library, variant


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
