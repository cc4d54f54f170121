"""The drafter's linear ends on the host: what goes into its blocks, and the centroid head on what comes out.

The head looks only into the clusters of the best centroids (transformers, Gemma4AssistantMaskedEmbedder): with Gemma 4 E2B's 2048
centroids and top 32, 4096 of 262144 rows. Everything is written into arrays made once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.head_file import HeadWeights

Vector = NDArray[np.float32]
_HIGH_HALF = np.uint32(0xFFFF0000)
_SIXTEEN = np.uint32(16)
_PIECE_BYTES = 256 << 10


class SparseHead:
    """Computes with a head file's weights. Results are views that the next call of the same method overwrites."""

    def __init__(self, weights: HeadWeights) -> None:
        centroids, per_centroid, hidden = weights.rows.shape
        target, top = weights.hidden_projection.shape[1], weights.top_centroids
        self.hidden_size = hidden
        self._weights = weights
        # Read at every step, so in memory for good; the rows and their order stay mapped.
        self._centroids = np.array(weights.centroids)
        self._embedding_projection = np.array(weights.embedding_projection)
        self._hidden_projection = np.array(weights.hidden_projection)
        self._feedback = np.array(weights.feedback)
        self._embedding_scale = np.float32(np.sqrt(np.float32(target)))
        self._scaled = np.empty(target, np.float32)
        self._input = np.empty(hidden, np.float32)
        self._carry = np.empty(hidden, np.float32)
        self._scores = np.empty(centroids, np.float32)
        self._tokens = np.empty((top, per_centroid), np.int32)
        self._logits = np.empty(top * per_centroid, np.float32)
        self._expand = _Bfloat16Rows(weights.rows, top) if weights.rows.dtype == np.uint16 else _Float32Rows(weights.rows, top)

    def carry_from_hidden(self, hidden: Vector) -> Vector:
        """Returns W_h h [hidden_size] for a hidden row of the target."""
        return np.matmul(self._hidden_projection, hidden, out=self._carry)

    def carry_from_output(self, output: Vector) -> Vector:
        """Returns W_h W_post cur [hidden_size] for the blocks' own output: the carry of the next step."""
        return np.matmul(self._feedback, output, out=self._carry)

    def block_input(self, embedding: Vector, carry: Vector) -> Vector:
        """Returns z = W_x (x sqrt(target's width)) + carry, where x is the target's unscaled embedding row of the last token."""
        np.multiply(embedding, self._embedding_scale, out=self._scaled)
        np.matmul(self._embedding_projection, self._scaled, out=self._input)
        return np.add(self._input, carry, out=self._input)

    def candidates(self, output: Vector) -> tuple[NDArray[np.int32], Vector]:
        """Returns the tokens of the best centroids' clusters, int32 [N], and their logits [N]: the support of the sparse head."""
        np.matmul(self._centroids, output, out=self._scores)
        best = np.argpartition(self._scores, -len(self._tokens))[-len(self._tokens) :]
        np.take(self._weights.token_ordering, best, axis=0, out=self._tokens, mode="clip")
        return self._tokens.reshape(-1), self._expand.logits(best, output, self._logits)

    def best_token(self, output: Vector) -> int:
        """Returns the likeliest candidate; of equally likely ones the lowest id, as an argmax over the whole vocabulary would."""
        tokens, logits = self.candidates(output)
        first = int(logits.argmax())
        ties = tokens[logits == logits[first]]
        # Nothing equals NaN, itself included: then there are no ties, and any candidate is as good a draft as another.
        return int(ties.min()) if len(ties) else int(tokens[first])


class _Float32Rows:
    """Logits of clusters whose rows [C, K, H] are float32."""

    def __init__(self, rows: NDArray[np.float32], top: int) -> None:
        self._rows = np.asarray(rows)
        self._step = _clusters_per_piece(rows, top)
        self._picked = np.empty((self._step, *rows.shape[1:]), np.float32)

    def logits(self, clusters: NDArray[np.intp], output: Vector, out: Vector) -> Vector:
        per_cluster, hidden = self._rows.shape[1:]
        for first in range(0, len(clusters), self._step):
            part = clusters[first : first + self._step]
            picked = np.take(self._rows, part, axis=0, out=self._picked[: len(part)], mode="clip")
            places = slice(first * per_cluster, (first + len(part)) * per_cluster)
            np.matmul(picked.reshape(-1, hidden), output, out=out[places])
        return out


class _Bfloat16Rows:
    """Logits of clusters whose rows [C, K, H] are bfloat16, two of which are taken as one 32-bit number.

    A bfloat16 is the upper half of a float32, so the even values of a row are the numbers' lower halves shifted up, the odd ones the
    numbers without their lower halves: two cheap passes give exact float32 values, in two arrays that are multiplied apart.
    """

    def __init__(self, rows: NDArray[np.uint16], top: int) -> None:
        self._pairs = np.asarray(rows).view(np.uint32)
        self._step = _clusters_per_piece(self._pairs, top)
        self._picked = np.empty((self._step, *self._pairs.shape[1:]), np.uint32)
        self._even = np.empty_like(self._picked)
        self._even_output = np.empty(self._pairs.shape[2], np.float32)
        self._odd_output = np.empty_like(self._even_output)
        self._odd_logits = np.empty(top * rows.shape[1], np.float32)

    def logits(self, clusters: NDArray[np.intp], output: Vector, out: Vector) -> Vector:
        per_cluster, width = self._pairs.shape[1:]
        self._even_output[:], self._odd_output[:] = output[0::2], output[1::2]
        for first in range(0, len(clusters), self._step):
            part = clusters[first : first + self._step]
            places = slice(first * per_cluster, (first + len(part)) * per_cluster)
            picked = np.take(self._pairs, part, axis=0, out=self._picked[: len(part)], mode="clip")
            even = np.left_shift(picked, _SIXTEEN, out=self._even[: len(part)])
            odd = np.bitwise_and(picked, _HIGH_HALF, out=picked)
            np.matmul(even.view(np.float32).reshape(-1, width), self._even_output, out=out[places])
            np.matmul(odd.view(np.float32).reshape(-1, width), self._odd_output, out=self._odd_logits[places])
        return np.add(out, self._odd_logits, out=out)


def _clusters_per_piece(rows: NDArray[Any], top: int) -> int:
    """How many clusters to take at once, so that they stay in the processor's own cache and leave the blocks' weights in the next."""
    return min(top, max(1, _PIECE_BYTES // int(rows[0].nbytes)))
