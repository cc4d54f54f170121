"""The drafter's linear ends on the host: what goes into its blocks, and the centroid head on what comes out.

The head computes only the clusters of the best centroids (transformers, Gemma4AssistantMaskedEmbedder): with Gemma 4 E2B's 2048
centroids and top 32, 4096 of 262144 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.llama.ggml_graph import GgmlContext
from edge_runtime.backends.llama.loader import LlamaLibrary
from edge_runtime.backends.llama.mapped_gguf import MappedTensor, map_gguf
from edge_runtime.errors import BackendError

Vector = NDArray[np.float32]
# Below so many bytes of weights a step, waking a second thread costs more than it brings (at 0.6 MB two threads took 0.038 ms, one 0.029).
_WORTH_THREADS = 1 << 20
FORMAT_KEY, TOP_KEY = "drafter_head.format", "drafter_head.top_centroids"
FORMAT = 2
_NAMES = ("rows", "token_ordering", "centroids", "embedding_projection", "hidden_projection", "feedback")


@dataclass(frozen=True, kw_only=True)
class HeadWeights:
    """The contents of a head file. C centroids of K tokens each, drafter width H, target width T.

    `rows` [C, K, H]: output rows as the drafter's file has them; `token_ordering` int32 [C, K]: whose rows they are; `centroids` [C, H],
    `embedding_projection` and `hidden_projection` [H, T], the halves of the pre-projection, and `feedback` [H, H], hidden_projection
    after the post-projection, are float16; `top_centroids`: how many centroids are searched.
    """

    rows: MappedTensor
    token_ordering: NDArray[np.int32]
    centroids: MappedTensor
    embedding_projection: MappedTensor
    hidden_projection: MappedTensor
    feedback: MappedTensor
    top_centroids: int


class SparseHead:
    """Computes with a head file's weights and the target's embedding table. Results are views that the next call overwrites.

    After `close` they are dead, and no method may be called.
    """

    def __init__(self, library: LlamaLibrary, weights: HeadWeights, embedding: MappedTensor, threads: int) -> None:
        self._worth_threads = _bytes_read(weights) >= _WORTH_THREADS
        self._context = context = GgmlContext(library)
        self.set_threads(threads)
        try:
            self._build(context, weights, embedding)
        except BaseException:
            context.close()
            raise

    def _build(self, context: GgmlContext, weights: HeadWeights, embedding: MappedTensor) -> None:
        target, hidden = weights.embedding_projection.shape
        self._ordering = np.asarray(weights.token_ordering)  # indexing a memory map costs microseconds, each step
        self._vocabulary, self._per_centroid = weights.token_ordering.size, weights.token_ordering.shape[1]
        token, row, carry, output = context.numbers(1), context.floats(target), context.floats(hidden), context.floats(hidden)
        first_carry = context.product(context.mapped(weights.hidden_projection), row)
        next_carry = context.product(context.mapped(weights.feedback), output)
        # The target scales its embedding, as every Gemma does.
        scaled = context.scaled(context.row(context.mapped(embedding), token), sqrt(target))
        block_input = context.sum(context.product(context.mapped(weights.embedding_projection), scaled), carry)
        scores = context.product(context.mapped(weights.centroids), output)
        best = context.greatest(scores, weights.top_centroids)
        logits = context.product_of(context.mapped(weights.rows), output, best)
        self._first, self._before, self._after = context.graph(first_carry), context.graph(block_input), context.graph(logits, next_carry)
        context.allocate()
        candidates = weights.top_centroids * self._per_centroid
        self._token, self._row = context.array(token, 1, np.int32), context.array(row, target)
        self._carry, self._output = context.array(carry, hidden), context.array(output, hidden)
        self._first_carry, self._next_carry = context.array(first_carry, hidden), context.array(next_carry, hidden)
        self._block_input = context.array(block_input, hidden)
        self._best, self._logits = context.array(best, weights.top_centroids, np.int32), context.array(logits, candidates)

    def set_threads(self, threads: int) -> None:
        """Sets the number of threads; one thread is used where the work is too small for more."""
        self._context.set_threads(threads if self._worth_threads else 1)

    def first_carry(self, hidden: Vector) -> Vector:
        """Returns W_h h [hidden_size] for a hidden row [target's width] of the target."""
        self._row[:] = hidden
        self._context.compute(self._first)
        return self._first_carry

    def block_input(self, token: int, carry: Vector) -> Vector:
        """Returns z = W_x (x sqrt(target's width)) + carry, where x is the target's unscaled embedding row of `token`."""
        if not 0 <= token < self._vocabulary:
            raise BackendError(f"token id {token} is not one of {self._vocabulary}; report this as a bug")
        self._token[0] = token
        self._carry[:] = carry
        self._context.compute(self._before)
        return self._block_input

    def feed(self, output: Vector) -> Vector:
        """Computes the head on the blocks' own output [hidden_size]; returns W_h W_post cur, the carry of the next step."""
        self._output[:] = output
        self._context.compute(self._after)
        return self._next_carry

    @property
    def logits(self) -> Vector:
        """The candidates' logits [N], a view."""
        return self._logits

    def candidates(self) -> tuple[NDArray[np.int32], Vector]:
        """Returns the tokens of the best centroids' clusters, int32 [N], and their logits [N]: the support of the sparse head."""
        return self._ordering[self._best].reshape(-1), self._logits

    def best_token(self) -> int:
        """Returns the likeliest candidate; of equally likely ones the lowest id, as an argmax over the whole vocabulary would."""
        logits = self._logits
        first = int(logits.argmax())
        ties = logits == logits[first]
        if np.count_nonzero(ties) > 1:
            return int(self.candidates()[0][ties].min())
        # One or, where all are NaN, none: then any candidate is as good a draft as another.
        cluster, place = divmod(first, self._per_centroid)
        return int(self._ordering[self._best[cluster], place])

    def close(self) -> None:
        """Frees what ggml holds. Harmless when done twice."""
        self._context.close()


def _bytes_read(weights: HeadWeights) -> int:
    """What a step of the head reads: all centroids, the rows of the best ones, the feedback."""
    share = weights.top_centroids / weights.token_ordering.shape[0]
    return int(weights.centroids.data.nbytes + weights.rows.data.nbytes * share + weights.feedback.data.nbytes)


def read_head(library: LlamaLibrary, path: Path, *, hidden_size: int, target_hidden_size: int, vocabulary: int) -> HeadWeights:
    """Maps the head of a drafter `hidden_size` wide for this target.

    Raises BackendError if the file is damaged, of another format or for another pair, or if its order does not name every token once.
    """
    file = map_gguf(library, path, _NAMES, (FORMAT_KEY, TOP_KEY))
    if file.numbers.get(FORMAT_KEY) != FORMAT:
        raise BackendError(f"{path} is no head file of this version ({FORMAT_KEY} {FORMAT}); export the bundle again")
    ordering = file.tensors.get("token_ordering")
    clusters = ordering.shape if ordering is not None else ()
    if len(clusters) != 2 or clusters[0] * clusters[1] != vocabulary:
        raise BackendError(f"{path}: token_ordering has the shape {list(clusters)}, not {vocabulary} tokens; export the bundle again")
    per_centroid, centroids = clusters
    top = file.numbers.get(TOP_KEY, 0)
    if not 1 <= top <= centroids:
        raise BackendError(f"{path}: top_centroids is {top}, not a number from 1 to {centroids}; export the bundle again")
    order = file.tensor("token_ordering", clusters, ("i32",)).data.view(np.int32).reshape(centroids, per_centroid)
    _check_ordering(path, order, vocabulary)
    return HeadWeights(
        rows=file.tensor("rows", (hidden_size, per_centroid, centroids)),
        token_ordering=order,
        centroids=file.tensor("centroids", (hidden_size, centroids), ("f16",)),
        embedding_projection=file.tensor("embedding_projection", (target_hidden_size, hidden_size), ("f16",)),
        hidden_projection=file.tensor("hidden_projection", (target_hidden_size, hidden_size), ("f16",)),
        feedback=file.tensor("feedback", (hidden_size, hidden_size), ("f16",)),
        top_centroids=top,
    )


def _check_ordering(path: Path, ordering: NDArray[np.int32], vocabulary: int) -> None:
    if ordering.min() < 0 or ordering.max() >= vocabulary or np.bincount(ordering.ravel(), minlength=vocabulary).max() > 1:
        raise BackendError(f"{path}: token_ordering does not name each of {vocabulary} tokens once; export the bundle again")
