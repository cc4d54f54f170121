"""llama.cpp behind the seam: an ordinary context for the target, an MTP context that shares its memory for the drafter.

How the two work together is shown by llama.cpp's common/speculative.cpp (draft-mtp) and src/models/gemma4-assistant.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.base import Choose, Logits
from edge_runtime.backends.llama_context import (
    Batch,
    LlamaOptions,
    check_architecture,
    context_params,
    decode_error,
    floats,
    load_model,
    metadata,
    open_context,
    rewind_slack,
)
from edge_runtime.backends.llama_library import library
from edge_runtime.backends.llama_vocabulary import LlamaVocabulary
from edge_runtime.errors import BackendError, RequestError

__all__ = ["LlamaDrafter", "LlamaOptions", "LlamaTarget", "open_pair"]

_SEQUENCE = 0


class LlamaModel:
    """A model of llama.cpp and a context on it, freed exactly once. Close it, or use it as a context manager."""

    def __init__(self, path: Path, options: LlamaOptions) -> None:
        self._library = library()
        self._api = self._library.api
        self._pointer: Any = None
        self._model: Any = load_model(self._library, path, options)

    def close(self) -> None:
        """Frees the context and the model. Harmless when done twice."""
        if self._pointer is not None:
            self._api.llama_free(self._pointer)
            self._pointer = None
        if self._model is not None:
            self._api.llama_model_free(self._model)
            self._model = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class LlamaTarget(LlamaModel):
    """The target in a llama.cpp context. Implements `backends.base.Target`. Close it, or use it as a context manager."""

    def __init__(self, path: Path, options: LlamaOptions) -> None:
        super().__init__(path, options)
        self._options = options
        self._drafters: list[LlamaDrafter] = []
        try:
            self._open(path)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> None:
        options, api = self._options, self._api
        check_architecture(self._library, self._model, "gemma4", path)
        trained: int = api.llama_model_n_ctx_train(self._model)
        if options.context > trained:
            raise RequestError(f"context {options.context} is beyond the {trained} tokens of {path.name}; ask for at most that")
        self.max_rows = options.max_draft_length + 1
        self._pointer = open_context(self._library, self._model, context_params(self._library, options, self.max_rows), path)
        if options.draft:
            # Masked: hidden rows exist for flagged rows only, in their order, so that the last layer may leave out
            # the others (src/models/gemma4.cpp, inp_out_ids).
            self._library.staging.llama_set_embeddings_nextn(self._pointer, True, True)
        self.vocabulary = LlamaVocabulary(self._library, self._model)
        self.hidden_size: int = api.llama_model_n_embd_out(self._model)
        self.context = options.context
        self.length = 0
        self._tokens = np.zeros(options.context, np.int32)
        self._window: int = api.llama_model_n_swa(self._model)
        self._chunk: int = api.llama_n_batch(self._pointer)
        self.rewind_slack = rewind_slack(self.context, self._window, api.llama_n_ubatch(self._pointer))
        self._memory = api.llama_get_memory(self._pointer)
        self._batch = Batch(api, self._chunk)
        self._forget_hidden()

    def prefill(self, tokens: Sequence[int]) -> None:
        """Appends tokens, which may be none, in chunks of the batch size; only the last one's hidden row is computed, no logits are read.

        Raises RequestError if they do not fit the context or the vocabulary, BackendError if llama.cpp fails: then the cache is as it was.
        """
        if not tokens:
            return
        ids = self._checked(tokens)
        start = self.length
        self._forget_hidden()
        for first in range(0, len(ids), self._chunk):
            chunk = ids[first : first + self._chunk]
            last = first + len(chunk) == len(ids)
            self._decode(chunk, flagged=1 if last and self._options.draft else 0, undo_to=start)
        if self._options.draft:
            self._keep_hidden(self.length - 1, 1)

    def verify(self, tokens: Sequence[int]) -> Logits:
        """One forward over at most `max_rows` tokens; returns a view of llama.cpp's float32 logits [len(tokens), vocabulary].

        The view is dead after the next prefill, verify or close: copy what must last. Raises as `prefill` does.
        """
        ids = self._checked(tokens)
        if len(ids) > self.max_rows:
            raise RequestError(f"{len(ids)} rows are too many for one verify; the target was opened for at most {self.max_rows}")
        self._forget_hidden()
        start = self.length
        self._decode(ids, flagged=len(ids), undo_to=start)
        logits = floats(self._api.llama_get_logits(self._pointer), len(ids), self.vocabulary.size)
        if self._options.draft:
            self._keep_hidden(start, len(ids))
        return logits

    def rollback(self, length: int) -> None:
        """Forgets all rows from `length` on. The drafter goes on from the hidden row of the last kept token.

        Before the newest batch there is no such row: then drafts are empty until the next verify or prefill. Raises RequestError
        if the sliding cache no longer holds what a forward at `length` would attend to: never within `rewind_slack` rows of
        the greatest length so far. After such a refusal nothing has changed.
        """
        self._require_open()
        if not 0 <= length <= self.length:
            raise RequestError(f"cannot roll back to {length}: the cache holds {self.length} rows")
        lowest: int = self._api.llama_memory_seq_pos_min(self._memory, _SEQUENCE)
        if length > 0 and self._window and lowest > max(0, length - self._window + 1):
            raise RequestError(f"cannot roll back {self.length - length} rows to {length}: older rows are gone; prefill the text again")
        self._truncate(length)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The committed tokens [length]. A view: what it shows changes with the next forward after a rollback."""
        return self._tokens[: self.length]

    @property
    def hidden_row(self) -> NDArray[np.float32] | None:
        """The hidden row [hidden_size] of the last committed token, or None if it is not known. A view: valid until the next forward."""
        index = self.length - 1 - self._hidden_start
        return self._hidden[index] if 0 <= index < len(self._hidden) else None

    def close(self) -> None:
        """Frees the drafters, which live on this context's memory, then the context and the model. Harmless when done twice."""
        while self._drafters:
            self._drafters.pop().close()
        self._forget_hidden()
        super().close()

    def _require_open(self) -> None:
        if self._pointer is None:
            raise RequestError("the target is closed; open the bundle again")

    def _checked(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        self._require_open()
        if not tokens:
            raise RequestError("there is no token to decode; give at least one")
        if self.length + len(tokens) > self.context:
            raise RequestError(f"{self.length} + {len(tokens)} tokens exceed the context of {self.context}; shorten the text or raise it")
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.min() < 0 or ids.max() >= self.vocabulary.size:
            self.vocabulary.check(int(ids.min() if ids.min() < 0 else ids.max()))
        return ids

    def _decode(self, ids: NDArray[np.int64], *, flagged: int, undo_to: int) -> None:
        self._batch.fill(ids, self.length, flagged)
        self._library.log.clear()
        code: int = self._api.llama_decode(self._pointer, self._batch.structure)
        if code != 0:
            self._truncate(undo_to)
            raise decode_error(self._library, "target", code, len(ids))
        self._tokens[self.length : self.length + len(ids)] = ids
        self.length += len(ids)

    def _truncate(self, length: int) -> None:
        self._api.llama_memory_seq_rm(self._memory, _SEQUENCE, length, -1)
        self.length = length

    def _keep_hidden(self, start: int, rows: int) -> None:
        # No copy: drafting runs in another context, so these rows last until the target's next forward, which brings its own.
        pointer = self._library.staging.llama_get_embeddings_nextn(self._pointer)
        self._hidden_start = start
        self._hidden = floats(pointer, rows, self.hidden_size)

    def _forget_hidden(self) -> None:
        self._hidden_start = 0
        self._hidden = np.empty((0, 0), dtype=np.float32)


class LlamaDrafter(LlamaModel):
    """Gemma 4's MTP drafter on its target's memory, with the dense head that llama.cpp computes. Implements `backends.base.Drafter`."""

    def __init__(self, path: Path, target: LlamaTarget, options: LlamaOptions) -> None:
        super().__init__(path, options)
        self._target = target
        self._max_draft_length = options.max_draft_length
        try:
            self._open(path, options)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, options: LlamaOptions) -> None:
        api, target_context = self._api, self._target._pointer
        self._check_fit(path)
        params = context_params(self._library, options, 1)
        params.ctx_type = api.LLAMA_CONTEXT_TYPE_MTP
        params.ctx_other = target_context
        self._pointer = open_context(self._library, self._model, params, path)
        if self._library.staging.llama_get_ctx_other(self._pointer) != target_context:
            raise BackendError(f"llama.cpp gave {path.name} a KV cache of its own; this build cannot run Gemma 4's drafter, update it")
        self._library.staging.llama_set_embeddings_nextn(self._pointer, True, True)
        self._batch = Batch(api, 1, self._target.hidden_size)
        self._target._drafters.append(self)

    def draft(self, last: int, draft_length: int, choose: Choose | None = None) -> list[int]:
        """Returns `draft_length` tokens after `last`, fewer where `choose` ends them, none where the target has no hidden row (`rollback`).

        All steps stand at the same position, that of `last`, and write nothing to the cache (common/speculative.cpp, is_mem_shared).
        """
        if self._pointer is None:
            raise RequestError("the drafter is closed; open the bundle again")
        if draft_length > self._max_draft_length:
            raise RequestError(f"a draft of {draft_length} tokens is longer than the {self._max_draft_length} this pair was opened for")
        hidden = self._target.hidden_row
        if hidden is None or draft_length < 1:
            return []
        self._target.vocabulary.check(last)
        tokens: list[int] = []
        carry = self._first_carry(hidden)
        for _ in range(draft_length):
            chosen, carry = self._step(last, carry, choose)
            if chosen is None:
                break
            last = chosen
            tokens.append(last)
        return tokens

    def _first_carry(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the first step takes over from the target's hidden row: with a dense drafter the row itself."""
        return hidden

    def _step(self, token: int, carry: NDArray[np.float32], choose: Choose | None) -> tuple[int | None, NDArray[np.float32]]:
        """One draft step; returns the likeliest token, or what was chosen, and what the next step takes over: here the drafter's hidden row."""
        following = self._forward(token, carry)
        logits = floats(self._api.llama_get_logits(self._pointer), 1, self._target.vocabulary.size)
        return choose(logits[0]) if choose else int(logits[0].argmax()), following

    def _forward(self, token: int, embedding: NDArray[np.float32]) -> NDArray[np.float32]:
        """One forward with an embedding [target's hidden_size]; returns the hidden row of the same width, a view until the next one."""
        self._batch.fill_step(token, embedding, self._target.length)
        self._library.log.clear()
        code: int = self._api.llama_decode(self._pointer, self._batch.structure)
        if code != 0:
            raise decode_error(self._library, "drafter", code, 1)
        pointer = self._library.staging.llama_get_embeddings_nextn(self._pointer)
        return floats(pointer, 1, self._target.hidden_size).reshape(-1)

    def _check_fit(self, path: Path) -> None:
        """Raises BackendError if the drafter is not one of this target: llama.cpp itself would abort the process."""
        check_architecture(self._library, self._model, "gemma4-assistant", path)
        own, target, api = self._model, self._target, self._api
        self._compare("target hidden size", api.llama_model_n_embd_out(own), target.hidden_size, path)
        self._check_vocabulary(path)
        for name in ("key_length", "key_length_swa", "value_length", "value_length_swa"):
            mine = metadata(self._library, own, f"gemma4-assistant.attention.{name}")
            self._compare(name, mine, metadata(self._library, target._model, f"gemma4.attention.{name}"), path)

    def _check_vocabulary(self, path: Path) -> None:
        own: int = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._compare("vocabulary size", own, self._target.vocabulary.size, path)

    @staticmethod
    def _compare(name: str, own: object, wanted: object, path: Path) -> None:
        if own != wanted:
            raise BackendError(f"{path.name} is no drafter of this target: {name} {own} against {wanted}; export the pair again")


def open_pair(target_path: Path, drafter_path: Path | None, options: LlamaOptions) -> tuple[LlamaTarget, LlamaDrafter | None]:
    """Opens the target and, if there is one and `options.draft` is set, its drafter. Closing the target closes both.

    Raises BackendError if a file is missing or does not load, or if the two are no pair; then nothing stays open.
    """
    target = LlamaTarget(target_path, options)
    if drafter_path is None or not options.draft:
        return target, None
    try:
        return target, LlamaDrafter(drafter_path, target, options)
    except BaseException:
        target.close()
        raise
