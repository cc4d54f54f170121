"""The interface between the loop and a backend: token ids in, token ids and rows of logits out.

Hidden rows and K/V stay in the backend, which builds the drafter from its target, so that there is one cache to roll back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


class DraftSampler(Protocol):
    """Picks one draft; called once per draft, in order."""

    def __call__(self, logits: Logits, tokens: NDArray[np.integer] | None = None) -> int | None:
        """Returns a token id, or None if there is no valid candidate: then the draft ends before this position.

        `logits` are the drafter's, float32 [n]: of the whole vocabulary, or of the n different `tokens` only. They are not used
        after it returns, so a view is enough.
        """


# Called after each draft with the drafter's probability of its likeliest token; returns whether to draft another.
ShouldContinue = Callable[[float], bool]


class StopNumbers(NamedTuple):
    """What a stop rule knows in a round, for a drafter that weighs its drafts itself (formulas: `drafting.profit_policy`).

    `tables` are contiguous float64 and the same object as long as nothing in them changes: bounds of the bins of probability [bins - 1],
    costs of verifying and of drafting n tokens [longest + 1] each, of each bin the share that is accepted [bins], which bins follow
    [bins, bins], and the expected number of accepted drafts among the n after one [longest, bins].
    """

    tables: tuple[NDArray[np.float64], ...]
    rate: float
    any_prefix: bool


@runtime_checkable
class StopRule(Protocol):
    """A `ShouldContinue` whose decisions follow from numbers. A drafter that decides by them calls `take` once, after the draft."""

    def __call__(self, probability: float, /) -> bool:
        """As any `ShouldContinue`."""

    def numbers(self) -> StopNumbers:
        """Returns what decides now."""

    def take(self, probabilities: Sequence[float]) -> None:
        """Takes the drafter's probability of each draft, in the place of calls."""


class Target(Protocol):
    """The model whose output counts. `length` is the number of tokens whose K/V rows are committed."""

    length: int
    context: int
    rewind_slack: int

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The committed tokens [length], int32: the source of prompt lookup. A view that the next call may change."""

    @property
    def rollback_floor(self) -> int:
        """The smallest length above 0 that `rollback` can go back to now; `rewind_slack` promises how far it stays below `length`."""

    def prefill(self, tokens: Sequence[int], *, rows_read: int = 1) -> None:
        """Appends tokens to the cache; computes no logits. `tokens` may be any length up to the context.

        `rows_read`, 0 or 1: how many of the last rows are read afterwards; a draft before the next verify reads the last one. Pass 0 for
        all but the last piece of a prompt: then there are no drafts until the next forward. Of rows that are not read only K and V are
        needed; a backend may skip the rest, and later rows have the same bits.
        """

    def verify(self, tokens: Sequence[int]) -> Logits:
        """One forward over `tokens`, appended to the cache; returns float32 logits [len(tokens), vocabulary].

        The array may be a view that the next call overwrites.
        """

    def rollback(self, length: int) -> None:
        """Removes all rows from `length` on; the hidden row of the last kept token becomes the drafter's input."""

    def close(self) -> None:
        """Frees the resources of the backend."""


class KvRows(NamedTuple):
    """K/V rows of the newest positions, as bytes in the backend's own form: `full` [n, bytes], `sliding` [m, bytes], m at most n.

    A row holds all layers of its kind, so rows of one text can be cut and joined anywhere.
    """

    full: NDArray[np.uint8]
    sliding: NDArray[np.uint8]


@runtime_checkable
class SavableTarget(Target, Protocol):
    """A target whose K/V rows can be saved and restored.

    `row_bytes` are those of a full and of a sliding row of `KvRows`. `sliding_rows` is how many sliding rows before the next position a
    restore needs, all where there are fewer.
    """

    kv_type: str
    row_bytes: tuple[int, int]
    sliding_rows: int

    def state(self, first: int = 0) -> KvRows:
        """Returns the committed rows from position `first` on; of the sliding layers the newest of them that are still there."""

    def restore(self, tokens: Sequence[int], rows: KvRows) -> None:
        """Replaces all rows by these, which are those of `tokens`; the drafter has no hidden row until the next forward.

        What follows has the bits that it has after the forwards which made the rows. Raises RequestError if the rows are not as many or as
        long as they must be, then nothing was changed; BackendError if the backend refuses them, then the cache is empty.
        """


@runtime_checkable
class MediaTarget(Target, Protocol):
    """A target whose text may hold images and sound. `whole_rows` is the most rows of an image whose rows attend in both directions.

    It is 0 where rows attend to earlier ones only: then they may be appended in parts, and a rollback may end inside of an image.
    """

    whole_rows: int

    def prefill_rows(self, ids: Sequence[int], rows: NDArray[np.float32], *, whole: bool = False) -> None:
        """Appends soft rows [n, hidden size] to the cache; `ids` [n] are negative and stand for them in `tokens`. None of them is read.

        The rows of a `whole` image attend to each other in both directions.
        """


def inside_image(tokens: NDArray[np.int32], length: int) -> bool:
    """Whether the first `length` of these committed tokens end inside of a span of soft rows, whose ids are negative."""
    return bool(0 < length < len(tokens) and tokens[length - 1] < 0 and tokens[length] < 0)


class Drafter(Protocol):
    """Proposes tokens that follow `last`, the newest token, which is not in the target's cache yet."""

    stepwise: bool  # whether it calls `should_continue`

    def draft(
        self, last: int, draft_length: int, sampler: DraftSampler | None = None, should_continue: ShouldContinue | None = None
    ) -> list[int]:
        """Returns at most `draft_length` token ids, fewer if `should_continue` returns False. Does not change the target's cache.

        Each is the likeliest token, or the pick of `sampler`. Picked tokens must all be returned, before any that were not picked: dropping
        one because of its value would change the distribution of the output.
        """

    def close(self) -> None:
        """Frees the resources of the backend."""


class DraftRequest(NamedTuple):
    """A draft for one of the sequences that share a context; the other fields are the arguments of `Drafter.draft`."""

    sequence: int
    last: int
    draft_length: int
    sampler: DraftSampler | None = None
    should_continue: ShouldContinue | None = None


class SequenceBatch(Protocol):
    """Sequences that share a context, so that one forward serves several. A call holds at most one request for each sequence."""

    @property
    def targets(self) -> Sequence[Target]:
        """The sequences' targets; a sequence's number is its place here."""

    def draft_all(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Drafts for each request as the `Drafter.draft` of its sequence would."""

    def verify_all(self, batches: Sequence[tuple[int, Sequence[int]]]) -> list[Logits]:
        """Verifies (sequence, tokens) pairs as `Target.verify` would. Returns views that the next call for any sequence may overwrite."""

    def close(self) -> None:
        """Frees the resources of the backend."""


class Vocabulary(Protocol):
    """Text to token ids and back to bytes. `eog_tokens` are the ids that end a generation; `bos` and `eos` are -1 if there is none."""

    eog_tokens: frozenset[int]
    bos: int
    eos: int

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Text -> id of every control token; these must never come from untrusted text."""

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """Returns the token ids of `text`, with the beginning-of-sequence token first unless `add_bos` is False.

        `parse_special` lets control tokens that are written out in the text become those tokens.
        """

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Returns the UTF-8 bytes of one token; a character may be spread over several.

        Control tokens may be empty, unless `special` asks for their text.
        """
