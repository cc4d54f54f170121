"""The split drafter: its four blocks in llama.cpp, its linear ends on the host.

For a checkpoint with ordered embeddings llama.cpp's own drafter multiplies with the whole vocabulary at every step, which is most of
its work. This one gives llama.cpp the blocks alone (edge_export/split_body.py) and computes the sparse head beside it with ggml.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.base import Choose
from edge_runtime.backends.head_file import read_head
from edge_runtime.backends.llama_context import LlamaOptions, floats
from edge_runtime.backends.llama_cpp import LlamaDrafter, LlamaTarget
from edge_runtime.backends.mapped_gguf import map_gguf
from edge_runtime.backends.sparse_head import SparseHead
from edge_runtime.errors import BackendError

# With its own vocabulary gone, the body sees every token as this one; its embedding meets zeros.
_NO_TOKEN = 0
EMBEDDING = "token_embd.weight"


class LlamaSplitDrafter(LlamaDrafter):
    """Implements `backends.base.Drafter` with the files `drafter_body` and `drafter_head` of a bundle, on its target's memory."""

    def __init__(self, body: Path, head: Path, target: LlamaTarget, target_path: Path, options: LlamaOptions) -> None:
        """Raises BackendError if a file does not load or is not of this target; embedding rows are read from `target_path`."""
        self._head: SparseHead | None = None
        super().__init__(body, target, options)
        try:
            self._width: int = self._api.llama_model_n_embd(self._model)
            vocabulary, hidden = target.vocabulary.size, target.hidden_size
            if self._width > hidden:
                raise BackendError(f"{body.name} is {self._width} wide, more than its target's {hidden}; export the pair again")
            weights = read_head(
                self._library, head, hidden_size=self._width, target_hidden_size=hidden, vocabulary=vocabulary
            )  # fmt: skip
            embedding = map_gguf(self._library, target_path, (EMBEDDING,)).tensor(EMBEDDING, (hidden, vocabulary))
            self._head = SparseHead(self._library, weights, embedding, options.threads)
        except BaseException:
            self.close()
            raise
        self._fed = np.zeros(hidden, np.float32)

    def close(self) -> None:
        """As the dense drafter does; frees the head too."""
        super().close()
        if self._head is not None:
            self._head.close()
            self._head = None

    def _first_carry(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        assert self._head is not None
        return self._head.first_carry(hidden)

    def _step(self, token: int, carry: NDArray[np.float32], choose: Choose | None) -> tuple[int, NDArray[np.float32]]:
        """One forward of the blocks between the two linear ends; `carry` [width] is the hidden row's share of their input."""
        head = self._head
        assert head is not None
        self._fed[: self._width] = head.block_input(token, carry)
        self._forward(_NO_TOKEN, self._fed)
        # The body's vocabulary is an identity: its logits are the last block's normed output.
        following = head.feed(floats(self._api.llama_get_logits(self._pointer), 1, self._width)[0])
        return (head.best_token() if choose is None else _choice(choose, head)), following

    def _check_vocabulary(self, path: Path) -> None:
        own: int = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._compare("vocabulary size", own, self._api.llama_model_n_embd(self._model), path)


def _choice(choose: Choose, head: SparseHead) -> int:
    tokens, logits = head.candidates()
    return choose(logits, tokens)
