"""Second moments of the inputs of a model's matrices: [K, K], the mean over a text's rows of the products of all pairs of channels.

They take K^2 floats for each matrix, so they are kept in files, and matrices that multiply the same rows share one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from edge_export.errors import ExportError
from edge_export.quantization.compensation import Factor, Floats, factor_of

# Wider matrices have none: 12288 (the widest of E2B) take 604 MB of disk each, and time that grows with the square.
MAX_CHANNELS = 12288
# Damping changes little from 0.001 to 0.05 of the mean diagonal. The embedding is looked up too, where all its columns count alike.
_DAMPING = 0.01
_TABLE, _TABLE_DAMPING = "token_embd.weight", 0.5
# Matrices after the same norm, by the one that stands for them.
_SHARED = {"attn_k.weight": "attn_q.weight", "attn_v.weight": "attn_q.weight", "ffn_up.weight": "ffn_gate.weight"}


def shared_name(name: str) -> str:
    """The GGUF name under which the moments of the matrix with this GGUF name are kept."""
    head, dot, layer_and_matrix = name.partition(".")
    layer, _, matrix = layer_and_matrix.partition(".")
    return f"{head}.{layer}.{_SHARED[matrix]}" if dot and matrix in _SHARED else name


class SecondMoments:
    """The moments of one model's matrices, in files of `folder`, which is made if it does not exist."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self._last: tuple[Path, Factor | None] | None = None

    def check_space(self, needed: int) -> None:
        """Raises ExportError if the disk has no room for so many bytes of moments."""
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise ExportError(
                f"calibration keeps {needed} bytes of second moments beside the bundle while it is made, {free} are free;"
                " free some space, choose another disk, or give an importance matrix (--imatrix), which needs none"
            )

    def add(self, name: str, moments: Floats) -> None:
        """Keeps the moments [K, K] of a matrix, given by its GGUF name."""
        np.save(self._path(name), moments)

    def has(self, name: str) -> bool:
        """Whether the matrix with this GGUF name has moments."""
        return self._path(name).is_file()

    def factor(self, name: str) -> Factor | None:
        """The factored moments of a matrix that has them, by its GGUF name, None if they are all zero; the last are kept in memory."""
        path = self._path(name)
        if self._last is None or self._last[0] != path:
            damping = _TABLE_DAMPING if name == _TABLE else _DAMPING
            self._last = path, factor_of(np.load(path, allow_pickle=False), damping)
        return self._last[1]

    def _path(self, name: str) -> Path:
        return self._folder / f"{shared_name(name)}.npy"
