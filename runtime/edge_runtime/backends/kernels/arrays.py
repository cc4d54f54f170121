"""Converts NumPy arrays to addresses for native code, which reads memory unchecked; done only here."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


def handed(array: NDArray[Any], kind: DTypeLike, size: int, *, more: bool = False) -> int:
    """Returns where the elements lie of an array that native code reads or writes; whoever calls keeps it alive meanwhile.

    Raises ValueError unless they lie one behind the other as their type demands, which is this one, and are `size` in number, or `more`.
    """
    fits = array.dtype == kind and (array.size == size or (more and array.size > size))
    if not (fits and array.flags.c_contiguous and array.flags.aligned):
        raise ValueError(f"an array of {array.size} {array.dtype} in the place of {size} {np.dtype(kind)}")
    return int(array.__array_interface__["data"][0])
