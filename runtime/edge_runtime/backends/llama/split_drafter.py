"""The split drafter: its four blocks in llama.cpp, its linear ends on the host.

For a checkpoint with ordered embeddings llama.cpp's own drafter multiplies with the whole vocabulary at every step, which is most of
its work. This one gives llama.cpp the blocks alone (edge_export/gguf/split_drafter.py) and computes the sparse head beside it with ggml.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from edge_runtime.backends.llama.context import LlamaOptions, floats
from edge_runtime.backends.llama.drafter import LlamaDrafter, Row, Step, top_probability
from edge_runtime.backends.llama.mapped_gguf import map_gguf
from edge_runtime.backends.llama.sparse_head import HeadWeights, SparseHead, read_head
from edge_runtime.backends.llama.target import LlamaTarget
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.interfaces import DraftRequest

# With its own vocabulary gone, the body sees every token as this one; its embedding meets zeros.
_NO_TOKEN = 0
EMBEDDING = "token_embd.weight"


class LlamaSplitDrafter(LlamaDrafter):
    """Implements `interfaces.Drafter` with the files `drafter_body` and `drafter_head` of a bundle, on its target's memory."""

    def __init__(self, body: Path, head: Path, target: LlamaTarget, target_path: Path, options: LlamaOptions) -> None:
        """Raises BackendError if a file does not load or is not of this target; embedding rows are read from `target_path`."""
        self._head: SparseHead | None = None
        super().__init__(body, target, options)
        try:
            self._width: int = self._api.llama_model_n_embd(self._model)
            vocabulary, hidden = target.vocabulary.size, target.hidden_size
            if self._width > hidden:
                raise BackendError(f"{body.name} is {self._width} wide, more than its target's {hidden}; export the pair again")
            weights = read_head(self._library, head, hidden_size=self._width, target_hidden_size=hidden, vocabulary=vocabulary)
            embedding = map_gguf(self._library, target_path, (EMBEDDING,)).tensor(EMBEDDING, (hidden, vocabulary))
            self._head = SparseHead(self._library, _with_candidates(weights, options.max_candidates), embedding, options.threads)
        except BaseException:
            self.close()
            raise
        self._fed = np.zeros((options.sequences, hidden), np.float32)
        self._carries = np.zeros((options.sequences, self._width), np.float32)

    def set_threads(self, threads: int) -> None:
        """Sets the threads of the blocks and of the head."""
        super().set_threads(threads)
        self._opened().set_threads(threads)

    def close(self) -> None:
        """As the dense drafter does; frees the head too."""
        super().close()
        if self._head is not None:
            self._head.close()
            self._head = None

    def _first_carry(self, hidden: Row, number: int) -> Row:
        return self._kept(self._opened().first_carry(hidden), number)

    def _step(self, steps: Sequence[tuple[DraftRequest, int, Row]]) -> list[Step]:
        """One forward of the blocks between the two linear ends; a carry [width] is the hidden row's share of their input."""
        head = self._opened()
        fed = []
        for i, (request, token, carry) in enumerate(steps):
            self._fed[i, : self._width] = head.block_input(token, carry)
            fed.append((request, _NO_TOKEN, self._fed[i]))
        self._decode(fed)
        # The body's vocabulary is an identity: its logits are the last block's normed output.
        outputs = floats(self._api.llama_get_logits(self._pointer), len(steps), self._width)
        return [self._settle(head, request, output) for (request, _, _), output in zip(steps, outputs, strict=True)]

    def _settle(self, head: SparseHead, request: DraftRequest, output: Row) -> Step:
        carry = self._kept(head.feed(output), request.sequence)
        confidence = top_probability(head.logits) if request.should_continue else 0.0
        if request.sampler is None:
            return head.best_token(), confidence, carry
        tokens, logits = head.candidates()
        return request.sampler(logits, tokens), confidence, carry

    def _kept(self, carry: Row, number: int) -> Row:
        # The head's own array serves one sequence at a time.
        kept: Row = self._carries[number]
        kept[:] = carry
        return kept

    def _opened(self) -> SparseHead:
        if self._head is None:
            raise RequestError("the drafter is closed; open the bundle again")
        return self._head

    def _check_vocabulary(self, path: Path) -> None:
        own: int = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._compare("vocabulary size", own, self._api.llama_model_n_embd(self._model), path)


def _with_candidates(weights: HeadWeights, max_candidates: int | None) -> HeadWeights:
    """Takes fewer clusters if the head's own are more than `max_candidates` tokens. Raises RequestError if not one cluster is so small."""
    if max_candidates is None:
        return weights
    per_cluster = weights.token_ordering.shape[1]
    if max_candidates < per_cluster:
        raise RequestError(
            f"max_candidates is {max_candidates}, but the head's smallest choice is one cluster of {per_cluster} tokens; ask for more"
        )
    return replace(weights, top_centroids=min(weights.top_centroids, max_candidates // per_cluster))
