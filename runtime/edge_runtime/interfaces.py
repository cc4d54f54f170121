"""The interface between the loop and a backend: token ids in, token ids and rows of logits out.

Hidden rows and K/V rows stay in the backend. It builds the drafter from its target, so there is only one cache to roll back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


class DraftSampler(Protocol):
    """Picks one draft token; called once per draft token, in order."""

    def __call__(self, logits: Logits, tokens: NDArray[np.integer] | None = None) -> int | None:
        """Returns a token id, or None if there is no valid candidate: then the draft ends before this position.

        `logits` are the drafter's, float32 [n]: for the whole vocabulary, or only for the n distinct `tokens` if these are given. The
        sampler keeps no reference to them, so they may be a view.
        """


# Called after each draft token with the drafter's probability of its likeliest token; returns whether to draft another one.
ShouldContinue = Callable[[float], bool]


class StopNumbers(NamedTuple):
    """The numbers of a stop rule in one round, for a drafter that decides by itself when to stop (formulas: `drafting.profit_policy`).

    `tables` are contiguous float64 arrays; the tuple is the same object as long as no array changes. In order: bounds between the
    confidence bins [bins - 1]; costs of verifying n drafts [rows + 1] and of drafting n tokens [longest + 1]; then `accept_prob`,
    `transition` and `further` of `drafting.acceptance_model.Forecast`. `rate` is the reference rate: what a unit of cost is worth, in
    tokens. `any_prefix`: the last drafts of the round may be left out of the verify.
    """

    tables: tuple[NDArray[np.float64], ...]
    rate: float
    any_prefix: bool


@runtime_checkable
class StopRule(Protocol):
    """A `ShouldContinue` whose decisions follow from numbers, so that native code can make them instead.

    A drafter that does so calls `take` once after the draft, and never calls the rule itself.
    """

    def __call__(self, probability: float, /) -> bool:
        """See `ShouldContinue`."""

    def numbers(self) -> StopNumbers:
        """Returns the numbers that decide in this round."""

    def take(self, probabilities: Sequence[float]) -> None:
        """Takes the drafter's probability of each draft token, where the rule itself was not called."""


class Target(Protocol):
    """The model whose output counts. `length` is the number of committed tokens: those whose K/V rows are in the cache."""

    length: int
    context: int
    rewind_slack: int

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The committed tokens [length], int32, which prompt lookup searches. A view that the next call may change."""

    @property
    def rollback_floor(self) -> int:
        """The smallest length above 0 that `rollback` accepts now. Except after `restore`, at least `rewind_slack` rows can be removed."""

    def prefill(self, tokens: Sequence[int], *, rows_read: int = 1) -> None:
        """Appends tokens to the cache; computes no logits. `tokens` may be of any length up to the context.

        `rows_read` is 1 if the hidden row of the last token will be read, as a draft before the next verify does, else 0. Pass 0 for all
        but the last piece of a prompt; drafting is then unavailable until the next forward. For rows that are not read, a backend may
        compute K and V only; the bits of later rows do not depend on it.
        """

    def verify(self, tokens: Sequence[int]) -> Logits:
        """One forward over `tokens`, appended to the cache; returns float32 logits [len(tokens), vocabulary].

        The array may be a view that the next call overwrites.
        """

    def rollback(self, length: int) -> None:
        """Removes all rows from `length` on. The drafter continues from the hidden row of the last kept token."""

    def close(self) -> None:
        """Frees the resources of the backend."""


class KvRows(NamedTuple):
    """K/V rows of the newest positions, as bytes in the backend's own format: `full` [n, bytes], `sliding` [m, bytes], m at most n.

    `full` is of the layers with full attention, `sliding` of those with a sliding window. A row holds one position in all layers of its
    kind, so rows of one text can be cut and joined at any position.
    """

    full: NDArray[np.uint8]
    sliding: NDArray[np.uint8]


@runtime_checkable
class SavableTarget(Target, Protocol):
    """A target whose K/V rows can be saved and restored.

    `row_bytes` are the sizes of a full and of a sliding row of `KvRows`. `sliding_rows` is how many of the newest sliding rows a restore
    needs; a shorter text needs all of its rows.
    """

    kv_type: str
    row_bytes: tuple[int, int]
    sliding_rows: int

    def state(self, first: int = 0) -> KvRows:
        """Returns the committed rows from position `first` on; for the sliding layers, those of them that the cache still holds."""

    def restore(self, tokens: Sequence[int], rows: KvRows) -> None:
        """Replaces the contents of the cache by the saved `rows` of `tokens`. Drafting is unavailable until the next forward.

        Later results have the same bits as after the forwards that computed the rows. Raises RequestError if the number or the size of the
        rows is wrong; the cache is then unchanged. Raises BackendError if the backend refuses them; the cache is then empty.
        """


@runtime_checkable
class MediaTarget(Target, Protocol):
    """A target whose prompt may contain images and sound.

    `whole_rows` is the size limit, in rows, of an image whose rows attend to each other in both directions. It is 0 where all attention is
    causal: then an image may be appended in parts, and a rollback may end inside it.
    """

    whole_rows: int

    def prefill_rows(self, ids: Sequence[int], rows: NDArray[np.float32], *, whole: bool = False) -> None:
        """Appends soft rows [n, hidden size], which are embeddings without tokens. Negative `ids` [n] stand for them in `tokens`.

        Drafting is unavailable until the next forward of a token. The rows of a `whole` image attend to each other in both directions.
        """


def inside_image(tokens: NDArray[np.int32], length: int) -> bool:
    """Whether cutting the committed tokens at `length` would cut a span of soft rows, whose ids are negative."""
    return bool(0 < length < len(tokens) and tokens[length - 1] < 0 and tokens[length] < 0)


class Drafter(Protocol):
    """Proposes the tokens after `last`, the newest token, which is not in the target's cache yet."""

    stepwise: bool  # whether it calls `should_continue` after each token

    def draft(
        self, last: int, draft_length: int, sampler: DraftSampler | None = None, should_continue: ShouldContinue | None = None
    ) -> list[int]:
        """Returns at most `draft_length` token ids, fewer if `should_continue` returns False. Does not change the target's cache.

        Each is the likeliest token, or the one that `sampler` picks. All picked tokens must be returned, before any others: dropping one
        because of its value would change the distribution of the output.
        """

    def close(self) -> None:
        """Frees the resources of the backend."""


class DraftRequest(NamedTuple):
    """A draft for one of the sequences that share a context: its number, and the arguments of `Drafter.draft`."""

    sequence: int
    last: int
    draft_length: int
    sampler: DraftSampler | None = None
    should_continue: ShouldContinue | None = None


class SequenceBatch(Protocol):
    """Sequences that share a context, so that one forward serves several. A call has at most one request for each sequence."""

    @property
    def targets(self) -> Sequence[Target]:
        """The target of each sequence; its index is the number of the sequence."""

    def draft_all(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Drafts for each request as the `Drafter.draft` of its sequence would."""

    def verify_all(self, batches: Sequence[tuple[int, Sequence[int]]]) -> list[Logits]:
        """Verifies (sequence, tokens) pairs as `Target.verify` would. Returns views that the next call for any sequence may overwrite."""

    def close(self) -> None:
        """Frees the resources of the backend."""


class Vocabulary(Protocol):
    """Converts text to token ids, and these to bytes. `eog_tokens` are the ids that end a generation; a missing `bos` or `eos` is -1."""

    eog_tokens: frozenset[int]
    bos: int
    eos: int

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """The text of every control token, with its id. Untrusted text must never become one of them."""

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """Returns the token ids of `text`, with the beginning-of-sequence token first unless `add_bos` is False.

        `parse_special` lets control tokens that are written out in the text become those tokens.
        """

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Returns the UTF-8 bytes of one token; a character may be spread over several tokens.

        A control token may give no bytes, unless `special` asks for its text.
        """
