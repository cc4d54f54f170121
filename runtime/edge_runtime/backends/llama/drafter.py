"""Gemma 4's MTP drafter in llama.cpp: an MTP context that shares its target's memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.llama.context import (
    MAX_SEQUENCES,
    Batch,
    LlamaModel,
    LlamaOptions,
    context_params,
    decode_error,
    floats,
    open_context,
)
from edge_runtime.backends.llama.target import LlamaSequence, LlamaTarget
from edge_runtime.bundle.gguf_gemma4 import DRAFTER, rows_read
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.interfaces import DraftRequest, DraftSampler, ShouldContinue

Row = NDArray[np.float32]
# A drafted token or None, the drafter's probability of its likeliest token, and the carry for the next step.
Step = tuple[int | None, float, Row]


class LlamaDrafter(LlamaModel):
    """The drafter on its target's memory, with the dense head that llama.cpp computes. Implements `interfaces.Drafter`.

    `draft` follows the target's first sequence; `draft_all` drafts for several sequences, step by step with one forward for all.
    """

    stepwise = True

    def __init__(self, path: Path, target: LlamaTarget, options: LlamaOptions) -> None:
        super().__init__(path, DRAFTER, options)
        self._target = target
        self._max_draft_length = options.max_draft_length
        try:
            self._open(path, options)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, options: LlamaOptions) -> None:
        api, target_context = self._api, self._target.shared._pointer
        self._check_fit(path)
        params = context_params(self._library, options, options.sequences)
        # It gets no prompts: buffers for a prompt batch would be most of its memory.
        params.n_batch = params.n_ubatch = MAX_SEQUENCES
        params.ctx_type = api.LLAMA_CONTEXT_TYPE_MTP
        params.ctx_other = target_context
        self._pointer = open_context(self._library, self._model, params, path)
        if self._library.staging.llama_get_ctx_other(self._pointer) != target_context:
            raise BackendError(f"llama.cpp gave {path.name} a KV cache of its own; this build cannot run Gemma 4's drafter, update it")
        self._library.staging.llama_set_embeddings_nextn(self._pointer, True, True)
        self._batch = Batch(api, options.sequences, self._target.hidden_size, sequences=options.sequences)
        self._target.shared.drafters.append(self)

    def set_threads(self, threads: int) -> None:
        """Sets the threads of a draft step. Raises RequestError if the drafter is closed."""
        if self._pointer is None:
            raise RequestError("the drafter is closed; open the bundle again")
        self._api.llama_set_n_threads(self._pointer, threads, threads)

    def draft(
        self, last: int, draft_length: int, sampler: DraftSampler | None = None, should_continue: ShouldContinue | None = None
    ) -> list[int]:
        """Returns `draft_length` tokens after `last`, fewer where `sampler` or `should_continue` ends the draft.

        Returns none if the target has no hidden row (see `rollback`).
        """
        return self.draft_all([DraftRequest(0, last, draft_length, sampler, should_continue)])[0]

    def draft_all(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Returns the drafts of each request; their sequences are all different.

        All steps are at the same position, that of `last`, and write nothing to the cache (common/speculative.cpp, is_mem_shared).
        """
        if self._pointer is None:
            raise RequestError("the drafter is closed; open the bundle again")
        drafts: list[list[int]] = [[] for _ in requests]
        carries: dict[int, Row] = {}
        for i, request in enumerate(requests):
            check_length(request, self._max_draft_length)
            hidden = self._sequence(request).hidden_row
            if hidden is not None and request.draft_length > 0:
                self._target.vocabulary.check(request.last)
                carries[i] = hidden
        while carries:
            steps = [(requests[i], drafts[i][-1] if drafts[i] else requests[i].last, carries[i]) for i in carries]
            for i, (token, confidence, carry) in zip(list(carries), self._step(steps), strict=True):
                if token is not None:
                    drafts[i].append(token)
                carries[i] = carry
                if token is None or _is_last(requests[i], confidence, len(drafts[i])):
                    del carries[i]
        return drafts

    def _sequence(self, request: DraftRequest) -> LlamaSequence:
        return self._target.shared.sequences[request.sequence]

    def _step(self, steps: Sequence[tuple[DraftRequest, int, Row]]) -> list[Step]:
        """Computes one draft step of each sequence from the newest token and the carry of the step before.

        Returns the likeliest or sampled token, its confidence if `should_continue` needs it, and the next carry: the drafter's hidden row.
        """
        self._batch.clear()
        for request, token, embedding in steps:
            self._batch.add_step(token, embedding, self._sequence(request).length, request.sequence)
        self._library.log.clear()
        code: int = self._api.llama_decode(self._pointer, self._batch.structure)
        if code != 0:
            raise decode_error(self._library, "drafter", code, len(steps))
        hidden = self._library.staging.llama_get_embeddings_nextn(self._pointer)
        following = floats(hidden, len(steps), self._target.hidden_size)  # views until the next forward
        logits = floats(self._api.llama_get_logits(self._pointer), len(steps), self._target.vocabulary.size)
        return [
            (
                request.sampler(row) if request.sampler else int(row.argmax()),
                top_probability(row) if request.should_continue else 0.0,
                carry,
            )
            for (request, _, _), row, carry in zip(steps, logits, following, strict=True)
        ]

    def _check_fit(self, path: Path) -> None:
        """Raises BackendError if the drafter is not one of this target: llama.cpp itself would abort the process."""
        self._compare("the model's hidden size", self._api.llama_model_n_embd_out(self._model), self._target.hidden_size, path)
        vocabulary: int = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._compare("vocabulary size", vocabulary, self._target.vocabulary.size, path)
        self._compare("K/V heads and widths of its layers", *rows_read(self.header, self._target.shared.header), path)

    @staticmethod
    def _compare(name: str, own: object, expected: object, path: Path) -> None:
        if own != expected:
            raise BackendError(f"{path.name} is not a drafter of this model: {name} {own} against {expected}; export the bundle again")


def check_length(request: DraftRequest, longest: int) -> None:
    """Raises RequestError for a draft that the pair was not opened for."""
    if request.draft_length > longest:
        raise RequestError(f"a draft of {request.draft_length} tokens is longer than the {longest} this bundle was opened for")


def top_probability(logits: Row) -> float:
    """Returns the softmax probability of the largest of `logits` [n]."""
    return float(1 / np.exp(logits - logits.max()).sum())


def _is_last(request: DraftRequest, confidence: float, drafted: int) -> bool:
    """Whether a draft is over. `should_continue` is called for every draft, the last one too."""
    more = request.should_continue is None or request.should_continue(confidence)
    return not more or drafted == request.draft_length
