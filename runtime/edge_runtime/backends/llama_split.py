"""The split drafter: its four blocks in llama.cpp, its linear ends on the host.

For a checkpoint with ordered embeddings llama.cpp's own drafter multiplies with the whole vocabulary at every step, which is most of
its work. This one gives llama.cpp the blocks alone (edge_export/split_body.py) and computes the sparse head in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from edge_runtime.backends.base import Choose, DraftAsk
from edge_runtime.backends.head_file import HeadWeights, read_head
from edge_runtime.backends.llama_context import LlamaOptions
from edge_runtime.backends.llama_drafter import LlamaDrafter, Row
from edge_runtime.backends.llama_rows import GgufRows
from edge_runtime.backends.llama_target import LlamaTarget
from edge_runtime.backends.sparse_head import SparseHead
from edge_runtime.errors import BackendError, RequestError

# With its own vocabulary gone, the body sees every token as this one; its embedding meets zeros.
_NO_TOKEN = 0
EMBEDDING = "token_embd.weight"


class LlamaSplitDrafter(LlamaDrafter):
    """Implements `backends.base.Drafter` with the files `drafter_body` and `drafter_head` of a bundle, on its target's memory."""

    def __init__(self, body: Path, head: Path, target: LlamaTarget, target_path: Path, options: LlamaOptions) -> None:
        """Raises BackendError if a file does not load or is not of this target; embedding rows are read from `target_path`."""
        super().__init__(body, target, options)
        try:
            width: int = self._api.llama_model_n_embd(self._model)
            if width > target.hidden_size:
                raise BackendError(f"{body.name} is {width} wide, more than its target's {target.hidden_size}; export the pair again")
            sizes = {"hidden_size": width, "target_hidden_size": target.hidden_size, "vocabulary": target.vocabulary.size}
            self._head = SparseHead(_with_candidates(read_head(head, **sizes), options.max_candidates))
            self._rows = GgufRows(self._library, target_path, EMBEDDING, target.vocabulary.size, target.hidden_size)
        except BaseException:
            self.close()
            raise
        self._pools = ThreadpoolController()
        self._row = np.zeros(target.hidden_size, np.float32)
        self._fed = np.zeros((options.sequences, target.hidden_size), np.float32)
        self._carries = [np.zeros(width, np.float32) for _ in range(options.sequences)]

    def draft_all(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """As the dense drafter does, with the host's products on one thread: numpy's own threads and llama.cpp's would wait for each other
        actively, which made a step of E2B's shape take 8 ms instead of 1 on two cores.
        """
        with self._pools.limit(limits=1, user_api="blas"):
            return super().draft_all(asks)

    def _first_carry(self, hidden: Row, number: int) -> Row:
        return self._kept(self._head.carry_from_hidden(hidden), number)

    def _step(self, steps: Sequence[tuple[DraftAsk, int, Row]]) -> list[tuple[int, Row]]:
        """One forward of the blocks between the two linear ends; a carry [hidden_size] is the hidden row's share of their input."""
        head = self._head
        fed = []
        for i, (ask, token, carry) in enumerate(steps):
            self._rows.read(token, self._row)
            self._fed[i, : head.hidden_size] = head.block_input(self._row, carry)
            fed.append((ask, _NO_TOKEN, self._fed[i]))
        outputs = self._forward(fed)[:, : head.hidden_size]
        return [self._settle(ask, output) for (ask, _, _), output in zip(steps, outputs, strict=True)]

    def _settle(self, ask: DraftAsk, output: Row) -> tuple[int, Row]:
        head = self._head
        chosen = head.best_token(output) if ask.choose is None else _choice(ask.choose, head, output)
        return chosen, self._kept(head.carry_from_output(output), ask.sequence)

    def _kept(self, carry: Row, number: int) -> Row:
        # The head's own array serves one sequence at a time.
        kept = self._carries[number]
        kept[:] = carry
        return kept

    def _check_vocabulary(self, path: Path) -> None:
        """The body has a dummy vocabulary; the head file is checked against the target's."""


def _with_candidates(weights: HeadWeights, most: int | None) -> HeadWeights:
    """Looks into fewer clusters if the head's own would be more than `most` tokens. Raises RequestError if not one cluster is so small."""
    if most is None:
        return weights
    per_cluster = weights.rows.shape[1]
    if most < per_cluster:
        raise RequestError(f"max_candidates is {most}, but the head's smallest choice is one cluster of {per_cluster} tokens; ask for more")
    return replace(weights, top_centroids=min(weights.top_centroids, most // per_cluster))


def _choice(choose: Choose, head: SparseHead, output: NDArray[np.float32]) -> int:
    tokens, logits = head.candidates(output)
    return choose(logits, tokens)
