"""The output rows of a drafter with ordered embeddings, straight from its checkpoint, each centroid's in one piece."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.safetensors import READABLE, widen

_CENTROIDS_PER_PIECE = 64


def cluster_rows(drafter: Checkpoint, ordering: NDArray[np.int32]) -> Iterator[NDArray[np.float32]]:
    """Yields output rows [n, hidden] in cluster order as float32, a few clusters at a time; `ordering` [vocabulary] is that order."""
    stored, model = drafter.tensors["model.embed_tokens.weight"], drafter.assistant
    # Mapped, because rows are wanted in another order than they lie: the page cache holds what memory has room for.
    table = np.memmap(stored.path, np.dtype(READABLE[stored.dtype]), "r", stored.offset, stored.shape)
    step = _CENTROIDS_PER_PIECE * (model.vocab_size // model.centroids)
    for first in range(0, len(ordering), step):
        yield widen(table[ordering[first : first + step]], stored.dtype)
