"""Acceptance rules: which drafts of a verified round are accepted, with sampling and constraints. Also log probabilities of tokens."""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_runtime.decoding.sampling import NothingToDraw, Sampler, SamplingParams
from edge_runtime.decoding.shared_noise import Distribution, Race, SharedNoise
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.interfaces import DraftSampler, Logits
from edge_runtime.text.grammar import Constraint

# The acceptance methods as pure functions, independent of models and caches.


class LogitRows(Protocol):
    """The target's logits at the positions of a round, for example an array [rows, vocabulary]."""

    def __getitem__(self, position: int, /) -> Logits:
        """Returns float32 [vocabulary]."""


class VerifyResult(NamedTuple):
    """The first `accepted` drafts are accepted; `next_token` is the target's own token after them."""

    accepted: int
    next_token: int


def accept_greedy(drafts: Sequence[int], logits: LogitRows) -> VerifyResult:
    """Accepts the longest prefix of `drafts` that the target would have chosen itself.

    `logits` are float32 [len(drafts) + 1, vocabulary]; row i predicts the token at the position of draft i. Rows after the first
    mismatch are not read.
    """
    return accept_by_match(drafts, lambda position: likeliest(logits[position]))


def likeliest(row: Logits) -> int:
    """Returns the index of the largest logit of a row [vocabulary].

    Raises BackendError for a row with NaN, which argmax prefers to any number, and for a row of equal logits: llama.cpp's own kernels turn
    NaN into 0.
    """
    best = int(row.argmax())
    wrong = ""
    if math.isnan(row[best]):
        wrong = f"hold NaN (first at token {best})"
    elif best == 0 and len(row) > 1 and row[-1] == row[0] and (row == row[0]).all():
        wrong = f"are all {row[0]}"
    if wrong:
        raise BackendError(f"the model's logits {wrong}; model or backend is broken: check the files with edge-run plan --check full")
    return best


def accept_by_match(drafts: Sequence[int], sampler: Callable[[int], int]) -> VerifyResult:
    """Accepts drafts as long as they equal the target's choices; `sampler(i)` is called once per position, in order.

    All emitted tokens are the target's own choices; drafts only change how many of them one forward yields. `sampler` is not called after
    the first mismatch.
    """
    for position, draft in enumerate(drafts):
        choice = sampler(position)
        if choice != draft:
            return VerifyResult(accepted=position, next_token=choice)
    return VerifyResult(accepted=len(drafts), next_token=sampler(len(drafts)))


def accept_by_block(
    drafts: Sequence[int], proposed: Sequence[Distribution], target: Callable[[int], Distribution], random: Callable[[], float]
) -> VerifyResult:
    """Speculative sampling by block verification, which judges all drafts together. Draft i must have been drawn from `proposed[i]`.

    `target(i)` returns the target's distribution at draft i; it may be called for all positions. `random` is uniform in [0, 1).

    On average at least as many drafts are accepted as by judging them one by one (arXiv 2211.17192, algorithm 1), because a likely token
    after an unlikely one can save both. With the target's p and the drafter's q, the first i drafts have s_i = min(1, s_{i-1} p_i(x_i) /
    q_i(x_i)). The longest prefix that passes is accepted: all n drafts pass with probability s_n, the first i drafts with probability
    w_i / (w_i + 1 - s_i), where w_i is the sum of max(s_i p_{i+1} - q_{i+1}, 0). The next token is drawn in proportion to these terms, or
    from p if all n drafts passed. The number of drafts may depend on the drafts themselves.

    Source: Sun et al. 2024 (arXiv 2403.10444), algorithm 2.
    """
    rows, shares = [], [1.0]
    for position, draft in enumerate(drafts):
        rows.append(target(position))
        shares.append(min(1.0, shares[-1] * rows[-1].of(draft) / proposed[position].of(draft)))
        if not shares[-1]:  # then no longer prefix can pass either
            break
    for accepted in range(len(shares) - 1, -1, -1):
        share = shares[accepted]
        if accepted == len(drafts):
            if random() < share:
                return VerifyResult(accepted=accepted, next_token=target(accepted).draw(random()))
        elif share:
            left = rows[accepted].excess(proposed[accepted], share)
            weight = float(left.sum())
            # With a share of 1 the prefix always passes. If `weight` is 0 too, target and drafter agree up to rounding.
            if share == 1.0 or random() * (weight + 1 - share) < weight:
                return VerifyResult(accepted=accepted, next_token=rows[accepted].proportional_to(left).draw(random()))
    raise AssertionError("the empty prefix always passes")


class AcceptanceRule(Protocol):
    """The rule of one request. Each round calls `sampler` for each draft, in order, then `cut` once, then `accept` once."""

    # Whether later drafts may decide how many drafts are verified, without changing the output's distribution.
    any_prefix: bool

    @property
    def sampler(self) -> DraftSampler | None:
        """Picks a draft from the drafter's logits; None: the drafter takes the likeliest token."""

    def cut(self, drafts: list[int]) -> list[int]:
        """Returns the drafts before the first one that a constraint forbids; without a constraint, all drafts."""
        return drafts

    def accept(self, drafts: Sequence[int], logits: LogitRows) -> VerifyResult:
        """Returns which drafts are accepted by the target's logits, float32 [len(drafts) + 1, vocabulary]; remembers the emitted tokens."""


class GreedyRule(AcceptanceRule):
    """Always emits the target's likeliest token. Needs no distribution and remembers no tokens."""

    any_prefix = True
    sampler = None

    def accept(self, drafts: Sequence[int], logits: LogitRows) -> VerifyResult:
        """Accepts the longest prefix that the target would have chosen itself."""
        return accept_greedy(drafts, logits)


class _SampledRule(AcceptanceRule):
    """Base class of sampled rules. It remembers the last tokens, which penalties need, and the sampled drafts of the round."""

    def __init__(self, sampler: Sampler, past: Sequence[int]) -> None:
        self._sampler = sampler
        self._past: list[int] = []
        self._drawn: list[int] = []
        self._remember(past)

    def _recent(self, drafts: Sequence[int]) -> Sequence[int]:
        return [*self._past, *drafts] if self._sampler.window else ()

    def _remember(self, tokens: Sequence[int]) -> None:
        self._drawn.clear()
        if self._sampler.window:
            self._past = [*self._past, *tokens][-self._sampler.window :]


class CoupledRule(_SampledRule):
    """Chooses the token of each position by noise that target and drafter share, and accepts a draft if it is that token.

    The text depends on the seed and the target only, not on drafts, drafter or draft length. Source: `decoding.shared_noise`.
    """

    any_prefix = True

    def __init__(self, sampler: Sampler, past: Sequence[int], noise: SharedNoise, place: int) -> None:
        """`place` is the number of tokens before the first one to choose."""
        self._noise = noise
        self._place = place
        super().__init__(sampler, past)

    @property
    def sampler(self) -> DraftSampler | None:
        """Chooses with the noise of the draft's position."""
        return self._choose

    def accept(self, drafts: Sequence[int], logits: LogitRows) -> VerifyResult:
        """Accepts the longest prefix that the target would have chosen itself."""

        def choice(position: int) -> int:
            return self._sampler.choose(logits[position], self._recent(drafts[:position]), self._noise.at(self._place + position))

        result = accept_by_match(drafts, choice)
        self._place += result.accepted + 1
        self._remember([*drafts[: result.accepted], result.next_token])
        return result

    def _choose(self, logits: Logits, tokens: NDArray[np.integer] | None = None) -> int | None:
        noise = self._noise.at(self._place + len(self._drawn))
        try:
            self._drawn.append(self._sampler.choose(logits, self._recent(self._drawn), noise, tokens))
        except NothingToDraw:  # every candidate of the drafter is banned; the target may have others
            return None
        return self._drawn[-1]


class BlockRule(_SampledRule):
    """Draws drafts from the drafter's distribution, with the target's sampling options, and accepts them by block verification."""

    # If later drafts decided whether a draft is verified, the verified drafts would not have the distribution that they were drawn from.
    any_prefix = False

    def __init__(self, sampler: Sampler, past: Sequence[int], random: Callable[[], float]) -> None:
        self._random = random
        self._proposed: list[Distribution] = []
        super().__init__(sampler, past)

    @property
    def sampler(self) -> DraftSampler | None:
        """Draws a draft and remembers its distribution."""
        return self._choose

    def accept(self, drafts: Sequence[int], logits: LogitRows) -> VerifyResult:
        """Accepts by block verification. Drafts that were not drawn, such as those of prompt lookup, count as drawn with probability 1.

        Raises BackendError if drawn drafts are missing or changed, because the output would not have the target's distribution.
        """
        if self._drawn != list(drafts[: len(self._drawn)]):
            raise BackendError(f"the drafter drew {self._drawn} but returned {list(drafts)}; it must return all tokens it drew, in order")
        proposed = [*self._proposed, *(Distribution.certain(draft) for draft in drafts[len(self._drawn) :])]

        def target(position: int) -> Distribution:
            return self._sampler(logits[position], self._recent(drafts[:position]))

        result = accept_by_block(drafts, proposed, target, self._random)
        self._proposed.clear()
        self._remember([*drafts[: result.accepted], result.next_token])
        return result

    def _choose(self, logits: Logits, tokens: NDArray[np.integer] | None = None) -> int | None:
        try:
            distribution = self._sampler(logits, self._recent(self._drawn), tokens)
        except NothingToDraw:  # every candidate of the drafter is banned; the target may have others
            return None
        self._proposed.append(distribution)
        self._drawn.append(distribution.draw(self._random()))
        return self._drawn[-1]


ACCEPTANCE_METHODS = ("coupled", "block")
GREEDY = GreedyRule()


def acceptance_rule(
    params: SamplingParams, method: str | None, past: Sequence[int], place: int | None = None, race: Race | None = None
) -> AcceptanceRule:
    """Returns the rule of a request whose earlier text tokens are `past`. Raises RequestError for an unknown method.

    The default is "coupled" with a seed and "block" without one, which accepts more drafts, but makes the text depend on them. `place` is
    the number of tokens before the first one to choose, including images and sound; None: the length of `past`. `race` finds the winners of
    shared noise.
    """
    if method not in (None, *ACCEPTANCE_METHODS):
        raise RequestError(f"acceptance method {method!r} is not known; choose one of {', '.join(ACCEPTANCE_METHODS)}")
    sampler = Sampler(params)
    if params.temperature == 0 and not sampler.adjusts:
        return GREEDY
    if keeps_text(params, method):
        # At temperature 0 nothing is drawn, so any seed will do.
        seed = params.seed if params.seed is not None else 0 if params.temperature == 0 else secrets.randbits(64)
        return CoupledRule(sampler, past, SharedNoise(seed, race), len(past) if place is None else place)
    return BlockRule(sampler, past, np.random.default_rng(params.seed).random)


def keeps_text(params: SamplingParams, method: str | None) -> bool:
    """Whether drafts leave the text itself unchanged, not only its distribution: if greedy, or chosen by shared noise."""
    return params.temperature == 0 or method == "coupled" or (method is None and params.seed is not None)


# Constraints: the acceptance rules on masked logits.
#
# A target with masked logits is just another model, which writes only valid text, so the guarantees of the rules hold for it too: the
# output with drafts equals that of constrained plain decoding, token for token or in distribution.

_NEVER = np.float32(-np.inf)


def constrained(rule: AcceptanceRule, constraint: Constraint) -> AcceptanceRule:
    """Returns `rule` on masked logits. The caller passes every emitted token to `constraint.advance` before the next round."""
    return ConstrainedGreedyRule(constraint) if rule is GREEDY else ConstrainedSampledRule(rule, constraint)


class _ConstrainedRule(ABC):
    """Base class of constrained rules. Drafts that `sampler` picked are valid; other drafts are cut before the first invalid one."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._drawn: list[int] = []

    @property
    def sampler(self) -> DraftSampler | None:
        """Picks a valid draft; ends the draft if the drafter has no valid candidate."""
        return self._choose

    def cut(self, drafts: list[int]) -> list[int]:
        """Returns the drafts before the first invalid one. Drafts that `sampler` picked need no check."""
        picked, self._drawn = len(self._drawn), []
        return drafts if len(drafts) == picked else drafts[: max(picked, self._constraint.valid(drafts))]

    def _choose(self, logits: Logits, tokens: NDArray[np.integer] | None = None) -> int | None:
        if self._constraint.closed(self._drawn):
            return None
        token = self._pick(logits, tokens)
        if token is not None:
            self._drawn.append(token)
        return token

    @abstractmethod
    def _pick(self, logits: Logits, tokens: NDArray[np.integer] | None) -> int | None:
        """Returns a valid draft, or None if there is no valid candidate."""

    def _masked(self, row: Logits, ahead: Sequence[int], tokens: NDArray[np.integer] | None = None) -> Logits:
        allowed = self._constraint.allowed(ahead)
        return np.where(allowed if tokens is None else allowed[tokens], row, _NEVER)


class ConstrainedGreedyRule(_ConstrainedRule):
    """Always emits the target's likeliest valid token. Masks a row only if its likeliest token is not valid."""

    any_prefix = True

    def accept(self, drafts: Sequence[int], logits: LogitRows) -> VerifyResult:
        """Accepts the longest prefix that the target would have chosen itself. Raises RequestError if no token is valid."""
        return accept_by_match(drafts, lambda position: self._target(drafts[:position], logits[position]))

    def _target(self, ahead: Sequence[int], row: Logits) -> int:
        token = self._likeliest(row, None, ahead)
        if token is None:
            raise RequestError("the model gives no finite logit to any token that the grammar allows; check the model")
        return token

    def _pick(self, logits: Logits, tokens: NDArray[np.integer] | None) -> int | None:
        return self._likeliest(logits, tokens, self._drawn)

    def _likeliest(self, row: Logits, tokens: NDArray[np.integer] | None, ahead: Sequence[int]) -> int | None:
        best = int(row.argmax())
        token = best if tokens is None else int(tokens[best])
        if self._constraint.allows(ahead, token):
            return token
        masked = self._masked(row, ahead, tokens)
        best = int(masked.argmax())
        if not masked[best] > _NEVER:  # also true for NaN
            return None
        return best if tokens is None else int(tokens[best])


class ConstrainedSampledRule(_ConstrainedRule):
    """A sampled rule on masked logits. Options such as top-k and top-p count valid tokens only."""

    def __init__(self, rule: AcceptanceRule, constraint: Constraint) -> None:
        super().__init__(constraint)
        self._rule = rule
        self.any_prefix = rule.any_prefix

    def accept(self, drafts: Sequence[int], logits: LogitRows) -> VerifyResult:
        """Accepts as the underlying rule does; rows are masked when they are read."""
        return self._rule.accept(drafts, _MaskedRows(self, drafts, logits))

    def _pick(self, logits: Logits, tokens: NDArray[np.integer] | None) -> int | None:
        masked = self._masked(logits, self._drawn, tokens)
        best = int(masked.argmax())
        if not masked[best] > _NEVER:
            return None
        assert self._rule.sampler is not None, "a sampled rule draws its drafts"
        token = self._rule.sampler(masked, tokens)
        # A bias may have banned every token that the constraint allows.
        return token if token is not None and self._constraint.allowed(self._drawn)[token] else None


@dataclass(frozen=True)
class _MaskedRows:
    """The target's logits after `drafts`, each row masked when it is read."""

    rule: ConstrainedSampledRule
    drafts: Sequence[int]
    logits: LogitRows

    def __getitem__(self, position: int) -> Logits:
        return self.rule._masked(self.logits[position], self.drafts[:position])


# Log probabilities of emitted tokens by the target's own logits: before temperature, penalties, bias and constraints.

MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A token and its log probability in nats; and the likeliest tokens of its position with theirs, the likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class LogprobRule:
    """Wraps another rule and records, for each emitted token, its log probability and the `top` likeliest tokens of its position."""

    def __init__(self, rule: AcceptanceRule, top: int) -> None:
        self.any_prefix = rule.any_prefix
        self._rule = rule
        self._top = top
        self._newest: list[TokenLogprob] = []

    @property
    def sampler(self) -> DraftSampler | None:
        return self._rule.sampler

    def cut(self, drafts: list[int]) -> list[int]:
        return self._rule.cut(drafts)

    def accept(self, drafts: Sequence[int], logits: LogitRows) -> VerifyResult:
        """Accepts as the other rule does; keeps one record per token of the round."""
        result = self._rule.accept(drafts, logits)
        tokens = [*drafts[: result.accepted], result.next_token]
        self._newest = [token_logprob(logits[position], token, self._top) for position, token in enumerate(tokens)]
        return result

    def take(self, tokens: int) -> list[TokenLogprob]:
        """Returns the records of the first `tokens` tokens of the newest round. A stop may have cut the rest off."""
        newest, self._newest = self._newest[:tokens], []
        return newest


def token_logprob(row: Logits, token: int, top: int) -> TokenLogprob:
    """Returns the record of `token` in a row of logits, float32 [vocabulary]."""
    wide = row.astype(np.float64)
    highest = float(wide.max())
    normalizer = highest + float(np.log(np.exp(wide - highest).sum()))
    best: list[int] = []
    if top:
        candidates = np.argpartition(-row, min(top, row.size - 1))[:top]
        best = sorted((int(i) for i in candidates), key=lambda i: (-float(row[i]), i))
    return TokenLogprob(token=token, logprob=float(wide[token]) - normalizer, top=tuple((i, float(wide[i]) - normalizer) for i in best))
