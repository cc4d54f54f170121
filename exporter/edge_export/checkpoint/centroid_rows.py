"""The output rows of a drafter with ordered embeddings, read from its checkpoint in the order of the centroids."""

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
    # Mapped, as rows are read in another order than they are stored; the page cache holds as many as fit into memory.
    table = np.memmap(stored.path, np.dtype(READABLE[stored.dtype]), "r", stored.offset, stored.shape)
    step = _CENTROIDS_PER_PIECE * (model.vocab_size // model.centroids)
    for first in range(0, len(ordering), step):
        yield widen(table[ordering[first : first + step]], stored.dtype)
