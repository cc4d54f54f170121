"""The target in llama.cpp: its tokenizer, and one context with the K/V rows of one or several sequences."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.committed_tokens import CommittedText, TokenRange, well_formed
from edge_runtime.backends.kernels.ggml import CellWatch, VisibleCells
from edge_runtime.backends.kernels.loader import address_of
from edge_runtime.backends.llama.context import (
    Batch,
    LlamaModel,
    LlamaOptions,
    cache_forms,
    context_params,
    decode_error,
    floats,
    open_context,
    rewind_slack,
    rows_of,
    state_of,
)
from edge_runtime.backends.llama.loader import LlamaLibrary
from edge_runtime.backends.llama.media_encoder import LlamaMediaEncoder
from edge_runtime.bundle.gguf_gemma4 import TARGET
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.interfaces import KvRows, Logits

# llama_tokenize counts bytes and tokens in int32, and a text can have as many tokens as bytes.
MAX_TEXT_BYTES = (1 << 31) - 64
_NO_TOKEN = -1
# llama_token_attr (include/llama.h). User-defined tokens stay visible in output; only those in Gemma 4's brackets are control tokens.
_UNKNOWN, _CONTROL, _USER_DEFINED = 1, 8, 16
_BRACKETED = re.compile(rb"<\|[^<>]+>|<[^<>]+\|>")


class LlamaVocabulary(TokenRange):
    """The vocabulary of a loaded model, valid until that model is closed. Implements `interfaces.Vocabulary`."""

    def __init__(self, library: LlamaLibrary, model: Any) -> None:
        self._api = library.api
        self.kept = {}
        self._open_vocab: Any = self._api.llama_model_get_vocab(model)
        self.size: int = self._api.llama_vocab_n_tokens(self._vocab)
        vocab, ends = self._vocab, self._api.llama_vocab_is_eog  # looked up once rather than for each of 262,144 tokens
        self.eog_tokens = frozenset(token for token in range(self.size) if ends(vocab, token))
        self.bos: int = self._api.llama_vocab_bos(self._vocab)
        self.eos: int = self._api.llama_vocab_eos(self._vocab)

    @property
    def _vocab(self) -> Any:
        if self._open_vocab is None:
            raise RequestError("the model of this vocabulary is closed; open the bundle again")
        return self._open_vocab

    def close(self) -> None:
        """Drops the pointer to the vocabulary, which the model owns. Can be called twice."""
        self._open_vocab = None
        self.kept.clear()

    @cached_property
    def control_tokens(self) -> Mapping[str, int]:
        """The texts of the control tokens, with their ids: <|turn> and the like, and visible marks in output such as <|channel>."""
        controls = {}
        for token in range(self.size):
            attributes = self._api.llama_vocab_get_attr(self._vocab, token)
            if attributes & (_UNKNOWN | _CONTROL | _USER_DEFINED):
                text = self.piece(token, special=True)
                if attributes & (_UNKNOWN | _CONTROL) or _BRACKETED.fullmatch(text):
                    controls[text.decode("utf-8", "replace")] = token
        return controls

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """Returns the token ids of `text`.

        Any str is accepted: NUL is an ordinary character, and a lone surrogate becomes U+FFFD.
        `parse_special` turns control tokens that are written out in the text, such as <|turn>, into those tokens; never set it for
        untrusted text.
        """
        data = well_formed(text).encode("utf-8")
        if len(data) > MAX_TEXT_BYTES:
            raise RequestError(f"the text has {len(data)} bytes, more than the {MAX_TEXT_BYTES} the tokenizer can take; shorten it")
        tokens = self._tokenize(data, parse_special)
        return [self.bos, *tokens] if add_bos and self.bos != _NO_TOKEN else tokens

    def _bytes_of(self, token: int, *, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            written: int = self._api.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if written >= 0:
                return buffer.raw[:written]
            size = -written

    def _tokenize(self, data: bytes, parse_special: bool) -> list[int]:
        # Byte fallback gives at most one token per byte.
        capacity = len(data) + 1
        # A ctypes array would create a new type for each length, which only the garbage collector frees.
        buffer = np.empty(capacity, np.int32)
        first = ctypes.byref(ctypes.c_int32.from_address(address_of(buffer, np.int32, capacity)))
        # add_special is False, because with it some files get <eos> as well as <bos>; `encode` adds <bos>.
        count: int = self._api.llama_tokenize(self._vocab, data, len(data), first, capacity, False, parse_special)
        if count < 0:
            raise RequestError(f"the tokenizer refused a text of {len(data)} bytes (code {count}); shorten it")
        return [int(token) for token in buffer[:count]]


# For how target and drafter work together in llama.cpp, see common/speculative.cpp (draft-mtp) and src/models/gemma4-assistant.cpp there.


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Tokens to append to a sequence. Logits and hidden rows are computed for the last `flagged` of them only."""

    sequence: LlamaSequence
    ids: NDArray[np.int64]
    flagged: int


class LlamaTargetContext(LlamaModel):
    """The target's model, and a context whose KV cache `options.sequences` sequences share. Closing it closes the drafters first."""

    def __init__(self, path: Path, options: LlamaOptions) -> None:
        super().__init__(path, TARGET, options)
        self.options = options
        self.drafters: list[Any] = []  # closed with this context
        self.sequences: list[LlamaSequence] = []
        self.encoder: LlamaMediaEncoder | None = None
        # Records which cells a forward attends to, for `LlamaKernelDrafter`, which sets and closes it.
        self.watch: CellWatch | None = None
        try:
            self._open(path)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> None:
        options, api = self.options, self._api
        trained: int = api.llama_model_n_ctx_train(self._model)
        if options.context > trained:
            raise RequestError(f"context {options.context} is beyond the {trained} tokens of {path.name}; ask for at most that")
        self.max_rows = options.max_draft_length + 1
        params = context_params(self._library, options, self.max_rows * options.sequences)
        self._pointer = open_context(self._library, self._model, params, path)
        # The last argument, masked: hidden rows exist for flagged rows only. So the last layer skips all other rows
        # (src/models/gemma4.cpp, inp_out_ids), and the row kernels skip them in earlier layers too (ggml/read_rows.h).
        self._library.staging.llama_set_embeddings_nextn(self._pointer, options.draft, True)
        self.vocabulary = LlamaVocabulary(self._library, self._model)
        self.hidden_size: int = api.llama_model_n_embd_out(self._model)
        self.window: int = api.llama_model_n_swa(self._model)
        self.forms = cache_forms(self.header, options.kv_type)
        self.chunk: int = api.llama_n_batch(self._pointer)
        slack = rewind_slack(options.context, self.window, api.llama_n_ubatch(self._pointer))
        # With several sequences, only the rows of the newest forward are sure to be removable (src/llama-kv-cache.cpp, find_slot).
        self.rewind_slack = slack if options.sequences == 1 else min(slack, self.max_rows)
        self._memory = api.llama_get_memory(self._pointer)
        self._threads = (options.threads, options.threads)
        self._set = options.threads
        self._batch = Batch(api, self.chunk, sequences=options.sequences)
        self._soft_batch: Batch | None = None

    def verify_all(self, batches: Sequence[tuple[LlamaSequence, Sequence[int]]]) -> list[Logits]:
        """Verifies the tokens of several sequences, all different, in one forward; returns logits [len(tokens), vocabulary] of each.

        They are views, valid until the next forward of any sequence. Raises as `LlamaSequence.verify` does; then no cache has changed.
        """
        rows = [Rows(sequence=sequence, ids=sequence.checked(tokens), flagged=len(tokens)) for sequence, tokens in batches]
        for group in rows:
            group.sequence.check_rows(len(group.ids), self.max_rows)
        self.forward(rows)
        total = sum(len(group.ids) for group in rows)
        logits = floats(self._api.llama_get_logits(self._pointer), total, self.vocabulary.size)
        ends = np.cumsum([len(group.ids) for group in rows]).tolist()
        return [logits[end - len(group.ids) : end] for group, end in zip(rows, ends, strict=True)]

    def set_threads(self, prefill: int, verify: int) -> None:
        """Sets the number of threads of prefills and of verifies; a verify of one row is plain decoding."""
        self._threads = (prefill, verify)

    def forward(self, rows: Sequence[Rows]) -> None:
        """Appends rows to their sequences in one llama_decode. Raises BackendError if it fails; then nothing was appended."""
        self.require_open()
        for sequence in self.sequences:
            sequence.keep_hidden(forget=any(sequence is group.sequence for group in rows))
        self._batch.clear()
        for group in rows:
            self._batch.add(group.ids, group.sequence.length, group.flagged, group.sequence.number)
        self._decode(self._batch, rows)
        if self.options.draft and (flagged := sum(group.flagged for group in rows)):
            self._hand_out_hidden(rows, flagged)

    def forward_soft(self, sequence: LlamaSequence, ids: NDArray[np.int64], rows: NDArray[np.float32], *, whole: bool) -> None:
        """Appends soft rows [n, hidden size] to a sequence; `ids` stand for them in `tokens`. Raises as `forward` does.

        If `whole`, they attend to each other in both directions, on the sliding layers only (src/models/gemma4.cpp, non_causal_type).
        """
        self.require_open()
        for other in self.sequences:
            other.keep_hidden(forget=other is sequence)
        if self._soft_batch is None:
            self._soft_batch = Batch(self._api, self.chunk, self.hidden_size, sequences=self.options.sequences)
        self._soft_batch.add_rows(rows, sequence.length, sequence.number)
        # Causal attention is a flag of the whole context, so no other sequence may share this forward.
        self._api.llama_set_causal_attn(self._pointer, not whole)
        try:
            self._decode(self._soft_batch, [Rows(sequence=sequence, ids=ids, flagged=0)])
        finally:
            self._api.llama_set_causal_attn(self._pointer, True)

    def _decode(self, batch: Batch, rows: Sequence[Rows]) -> None:
        self._library.log.clear()
        threads = self._threads[all(group.flagged == len(group.ids) for group in rows)]
        if threads != self._set:
            self._api.llama_set_n_threads(self._pointer, threads, threads)
            self._set = threads
        if self.watch is not None:
            self.watch.begin(batch.flags, batch.structure.n_tokens)
        try:
            code: int = self._api.llama_decode(self._pointer, batch.structure)
        finally:
            if self.watch is not None:
                self.watch.end()
        if code != 0:
            for group in rows:
                self.truncate(group.sequence.number, group.sequence.length)
            raise decode_error(self._library, "target", code, sum(len(group.ids) for group in rows))
        for group in rows:
            group.sequence.append(group.ids)

    def _hand_out_hidden(self, rows: Sequence[Rows], flagged: int) -> None:
        # Views are enough: drafting runs in another context, so these rows are valid until the target's next forward replaces them.
        hidden = floats(self._library.staging.llama_get_embeddings_nextn(self._pointer), flagged, self.hidden_size)
        first = 0
        for group in rows:
            group.sequence.take_flagged(hidden[first : first + group.flagged], first)
            first += group.flagged

    def truncate(self, number: int, length: int) -> None:
        """Drops the K/V rows of a sequence from `length` on."""
        self.require_open()
        self._api.llama_memory_seq_rm(self._memory, number, length, -1)

    def oldest_row(self, number: int) -> int:
        """Returns the position of the oldest row that is still in all layers; -1 if there is none."""
        self.require_open()
        lowest: int = self._api.llama_memory_seq_pos_min(self._memory, number)
        return lowest

    def state(self, number: int, length: int, first: int) -> KvRows:
        """Returns the rows of a sequence from position `first` on. Raises BackendError if llama.cpp returns none."""
        self.require_open()
        size: int = self._api.llama_state_seq_get_size(self._pointer, number)
        buffer = np.empty(size, np.uint8)
        self._library.log.clear()
        if self._api.llama_state_seq_get_data(self._pointer, _bytes_of(buffer), size, number) != size:
            raise BackendError(f"llama.cpp did not return the {size} bytes of the state{self._library.quoted_error()}; try again")
        return rows_of(buffer, self.forms, length, first)

    def restore(self, number: int, rows: KvRows) -> None:
        """Replaces the rows of a sequence. Raises BackendError if llama.cpp rejects them; the sequence is then empty."""
        self.truncate(number, 0)
        self._library.log.clear()
        state = state_of(rows, self.forms)
        if self._api.llama_state_seq_set_data(self._pointer, _bytes_of(state), len(state), number) != len(state):
            self.truncate(number, 0)
            raise BackendError(f"llama.cpp rejected the saved state{self._library.quoted_error()}; compute the text again")

    @property
    def is_open(self) -> bool:
        """Whether the context is open."""
        return self._pointer is not None

    def open_encoder(self, path: Path) -> LlamaMediaEncoder:
        """Opens the encoder of images and sound for this model, and closes the previous one. Raises BackendError if it does not load."""
        self.require_open()
        self.close_encoder()
        self.encoder = LlamaMediaEncoder(self._library, path, self._model, width=self.hidden_size, threads=self.options.threads)
        return self.encoder

    def close_encoder(self) -> None:
        """Frees the encoder, if one is open."""
        if self.encoder is not None:
            self.encoder.close()
            self.encoder = None

    def require_open(self) -> None:
        """Raises RequestError if the target is closed."""
        if not self.is_open:
            raise RequestError("the model is closed; open the bundle again")

    def close(self) -> None:
        """Frees the drafters, which use this context's KV cache, then the context and the model. Can be called twice."""
        self.close_encoder()
        while self.drafters:
            self.drafters.pop().close()
        for sequence in self.sequences:
            sequence.forget_hidden()
        if (vocabulary := getattr(self, "vocabulary", None)) is not None:
            vocabulary.close()
        super().close()


def _bytes_of(array: NDArray[np.uint8]) -> Any:
    # ctypes.cast would create a reference cycle, which keeps the state in memory until the garbage collector runs.
    return ctypes.byref(ctypes.c_uint8.from_address(address_of(array, np.uint8, array.size)))


class LlamaSequence(CommittedText):
    """One sequence of a target's context. Implements `interfaces.MediaTarget` and `interfaces.SavableTarget`."""

    def __init__(self, shared: LlamaTargetContext) -> None:
        whole = shared.chunk if shared.options.bidirectional else 0
        super().__init__(shared.options.context, shared.vocabulary, shared.hidden_size, whole_rows=whole)
        self.shared = shared
        self.number = len(shared.sequences)
        self.rewind_slack = shared.rewind_slack
        self.max_rows = shared.max_rows
        self.kv_type: str = shared.options.kv_type
        self.row_bytes = shared.forms[0].row_bytes, shared.forms[1].row_bytes
        self.sliding_rows = shared.window - 1
        self._first_flagged = 0
        self._cells: VisibleCells | None = None
        self._cells_kept = False
        shared.sequences.append(self)

    def prefill(self, tokens: Sequence[int], *, rows_read: int = 1) -> None:
        """Appends tokens, if any, in chunks of the batch size. Computes no logits, and hidden rows only for the last `rows_read` tokens.

        Raises RequestError if the tokens do not fit the context or the vocabulary, and BackendError if llama.cpp fails; after an error the
        cache is unchanged.
        """
        if not tokens:
            return
        ids = self.checked(tokens)
        start, chunk = self.length, self.shared.chunk
        try:
            for first in range(0, len(ids), chunk):
                last = first + chunk >= len(ids) and self.shared.options.draft
                self.shared.forward([Rows(sequence=self, ids=ids[first : first + chunk], flagged=rows_read if last else 0)])
        except BaseException:
            self._truncate(start)
            raise

    def prefill_rows(self, ids: Sequence[int], rows: NDArray[np.float32], *, whole: bool = False) -> None:
        """Appends the soft rows [n, hidden size] of an image or sound in chunks of the batch size; negative `ids` stand for them.

        A `whole` image must fit into one batch. Drafting is unavailable until the next forward of a token. Raises as `prefill` does.
        """
        values = self.checked_soft(ids, rows)
        start, chunk = self.length, self.shared.chunk
        if whole and len(values) > self.whole_rows:
            # Here llama.cpp would abort the process (src/llama-context.cpp, decode).
            raise RequestError(
                f"an image of {len(values)} tokens does not fit a batch of {self.whole_rows}; open the bundle with a larger one"
            )
        try:
            for first in range(0, len(values), chunk):
                self.shared.forward_soft(self, values[first : first + chunk], rows[first : first + chunk], whole=whole)
        except BaseException:
            self._truncate(start)
            raise

    def verify(self, tokens: Sequence[int]) -> Logits:
        """One forward over at most `max_rows` tokens; returns a view of llama.cpp's float32 logits [len(tokens), vocabulary].

        The view is valid until the next prefill, verify or close. Raises as `prefill` does.
        """
        return self.shared.verify_all([(self, tokens)])[0]

    def rollback(self, length: int) -> None:
        """Removes all rows from `length` on. The drafter continues from the hidden row of the last kept token.

        Only the newest forward has hidden rows. After a rollback to an earlier one, drafts are empty until the next verify or prefill.
        Raises RequestError if the sliding cache no longer holds the rows that a forward at `length` would attend to; then nothing has
        changed. Within `rewind_slack` rows of the greatest length so far, that never happens.
        """
        self.check_rollback(length)
        self._truncate(length)

    def state(self, first: int = 0) -> KvRows:
        """Returns the K/V rows from position `first` on; for the sliding layers, only those that the next token attends to."""
        return self.shared.state(self.number, self.length, first)

    def restore(self, tokens: Sequence[int], rows: KvRows) -> None:
        """Replaces the contents of the cache by the saved `rows` of `tokens`. Drafting is unavailable until the next forward.

        Only one window of sliding rows is restored, so `rollback_floor`, not `rewind_slack`, says how far a rollback can then go. Raises
        RequestError if the rows do not fit; the cache is then unchanged. Raises BackendError if llama.cpp refuses them; it is then empty.
        """
        self.check_state(tokens, rows)
        self.forget_hidden()
        self.length = 0
        window = self.shared.window
        self.shared.restore(self.number, KvRows(rows.full, rows.sliding[max(0, len(rows.sliding) - window) :]))
        self.append(np.asarray(tokens, np.int64))

    @property
    def rollback_floor(self) -> int:
        """The smallest length above 0 at which the cache holds all rows that the next forward attends to."""
        # llama.cpp evicts the oldest rows first (src/llama-kv-cache.cpp, apply_ubatch), and a row attends to window - 1 rows before it.
        oldest = self.shared.oldest_row(self.number)
        return oldest + self.shared.window - 1 if self.shared.window and oldest > 0 else 0

    def close(self) -> None:
        """Frees the sequence's rows in the context. Can be called twice, or after the context was closed."""
        if self.length and self.shared.is_open:
            self._truncate(0)

    def keep_hidden(self, *, forget: bool) -> None:
        """Must be called before a forward overwrites the context's hidden rows: copies the row that a draft needs, or forgets all."""
        row = None if forget else self.hidden_row
        if row is None:
            self.forget_hidden()
        else:
            self._cells_kept = self.visible_cells() is not None
            self.take_hidden(row[None].copy())

    def take_flagged(self, rows: NDArray[np.float32], first: int) -> None:
        """Keeps a view of the hidden rows of the newest tokens; `first` is the index of the first among the flagged rows of the forward."""
        self._first_flagged, self._cells_kept = first, False
        self.take_hidden(rows)

    def visible_cells(self) -> VisibleCells | None:
        """Returns the cells that the token of the hidden row attends to, or None if unknown. Valid until the next call or rollback."""
        watch = self.shared.watch
        if watch is None or self._cells_kept:
            return self._cells
        self._cells = self._cells or watch.room()
        row = self._first_flagged + self.length - 1 - self._hidden_start
        return self._cells if watch.visible(row, self._cells) else None

    def require_open(self) -> None:
        """Raises RequestError if the context is closed."""
        self.shared.require_open()

    def _truncate(self, length: int) -> None:
        self.shared.truncate(self.number, length)
        self.length = length


class LlamaTarget(LlamaSequence):
    """The target of a pair: it opens a context and is its first sequence. Close it, or use it as a context manager."""

    def __init__(self, path: Path, options: LlamaOptions) -> None:
        """Raises BackendError if the file does not load, RequestError if the context is too long for the model."""
        super().__init__(LlamaTargetContext(path, options))
        for _ in range(1, options.sequences):
            LlamaSequence(self.shared)

    def close(self) -> None:
        """Closes the context with all its sequences and drafters. Can be called twice."""
        self.shared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
