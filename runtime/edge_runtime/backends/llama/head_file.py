"""The file of a drafter's sparse head, which scores only the tokens of the best centroids (transformers, Gemma4AssistantMaskedEmbedder).

With Gemma 4 E2B's 2048 centroids and top 32 these are 4096 of 262144 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.llama.mapped_gguf import MappedGguf, MappedTensor
from edge_runtime.errors import BackendError

FORMAT_KEY, TOP_KEY = "drafter_head.format", "drafter_head.top_centroids"
# Format 2 had matrices beside these tensors, for a drafter in parts.
FORMATS = (2, 3)


@dataclass(frozen=True, kw_only=True)
class HeadWeights:
    """The contents of a head file. C centroids of K tokens each, drafter width H.

    `rows` [C, K, H]: output rows as the drafter's file has them; `token_ordering` int32 [C, K]: whose rows they are; `centroids` [C, H]
    float16; `top_centroids`: how many centroids are searched.
    """

    rows: MappedTensor
    token_ordering: NDArray[np.int32]
    centroids: MappedTensor
    top_centroids: int


def read_head(path: Path, *, hidden_size: int, vocabulary: int) -> HeadWeights:
    """Maps the head of a drafter `hidden_size` wide.

    Raises BackendError if the file is damaged, of another format or for another pair, or if its order does not name every token once.
    """
    file = MappedGguf(path)
    if file.header.keys.get(FORMAT_KEY) not in FORMATS:
        raise BackendError(f"{path} is no head file of this version ({FORMAT_KEY} {FORMATS[-1]}); export the bundle again")
    clusters = file.shape("token_ordering")
    if len(clusters) != 2 or clusters[0] * clusters[1] != vocabulary:
        raise BackendError(f"{path}: token_ordering has the shape {list(clusters)}, not {vocabulary} tokens; export the bundle again")
    per_centroid, centroids = clusters
    top = file.header.keys.get(TOP_KEY, 0)
    if not isinstance(top, int) or not 1 <= top <= centroids:
        raise BackendError(f"{path}: top_centroids is {top}, not a number from 1 to {centroids}; export the bundle again")
    order = file.tensor("token_ordering", clusters, ("i32",)).data.view(np.int32).reshape(centroids, per_centroid)
    _check_ordering(path, order, vocabulary)
    return HeadWeights(
        rows=file.tensor("rows", (hidden_size, per_centroid, centroids)),
        token_ordering=order,
        centroids=file.tensor("centroids", (hidden_size, centroids), ("f16",)),
        top_centroids=top,
    )


def _check_ordering(path: Path, ordering: NDArray[np.int32], vocabulary: int) -> None:
    if ordering.min() < 0 or ordering.max() >= vocabulary or np.bincount(ordering.ravel(), minlength=vocabulary).max() > 1:
        raise BackendError(f"{path}: token_ordering does not name each of {vocabulary} tokens once; export the bundle again")
