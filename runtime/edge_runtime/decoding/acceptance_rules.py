"""Acceptance rules: how a request samples its drafts and which of them are accepted."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge_runtime.decoding.acceptance import LogitRows, VerifyResult, accept_by_block, accept_by_match, accept_greedy
from edge_runtime.decoding.distribution import Distribution
from edge_runtime.decoding.sampling import NothingToDraw, Sampler, SamplingParams
from edge_runtime.decoding.shared_noise import Race, SharedNoise
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.interfaces import DraftSampler, Logits


class AcceptanceRule(Protocol):
    """The rule of one request. Each round calls `sampler` for each draft, in order, then `cut` once, then `accept` once."""

    any_prefix: bool  # whether drafts may be left unverified because of later ones, without changing the output's distribution

    @property
    def sampler(self) -> DraftSampler | None:
        """Picks a draft from the drafter's logits; None: the likeliest token."""

    def cut(self, drafts: list[int]) -> list[int]:
        """Returns the drafts before the first one that a constraint forbids; without a constraint all of them."""
        return drafts

    def accept(self, drafts: Sequence[int], logits: LogitRows) -> VerifyResult:
        """Returns which drafts are accepted, from the target's logits, float32 [len(drafts) + 1, vocabulary]; keeps the emitted tokens."""


class GreedyRule(AcceptanceRule):
    """Always the target's likeliest token. Needs no distribution and keeps no tokens."""

    any_prefix = True
    sampler = None

    def accept(self, drafts: Sequence[int], logits: LogitRows) -> VerifyResult:
        """Accepts the longest prefix that the target would have chosen itself."""
        return accept_greedy(drafts, logits)


class _SampledRule(AcceptanceRule):
    """State of all sampled rules: the last tokens, which the penalties need, and the sampled drafts of this round."""

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
    """Chooses the token of each place by noise that target and drafter share, and accepts an equal draft.

    The text is a function of the seed and the target: no drafts, drafter or draft length change it. Source: `decoding.shared_noise`.
    """

    any_prefix = True

    def __init__(self, sampler: Sampler, past: Sequence[int], noise: SharedNoise, place: int) -> None:
        """`place` is the number of tokens before the first one."""
        self._noise = noise
        self._place = place
        super().__init__(sampler, past)

    @property
    def sampler(self) -> DraftSampler | None:
        """Chooses with the noise of the draft's place."""
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
    """Draws drafts from the drafter's distribution, with the same options as for the target, and accepts them by block verification."""

    # A draft that is verified only because of later drafts no longer has the distribution that it was drawn from.
    any_prefix = False

    def __init__(self, sampler: Sampler, past: Sequence[int], random: Callable[[], float]) -> None:
        self._random = random
        self._proposed: list[Distribution] = []
        super().__init__(sampler, past)

    @property
    def sampler(self) -> DraftSampler | None:
        """Draws a draft and keeps its distribution."""
        return self._choose

    def accept(self, drafts: Sequence[int], logits: LogitRows) -> VerifyResult:
        """Drafts that were not drawn, such as those of prompt lookup, count as certain.

        Raises BackendError if drawn drafts are missing or changed: the output would no longer have the target's distribution.
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
    """Returns the rule of one request after the tokens `past`, which are text. Raises RequestError for an unknown method.

    Without a method it is "coupled" for a seed, and "block" without one: it accepts more drafts, but the text depends on them. `place` is
    the number of tokens before the request, images and sound included; None counts `past`. `race` finds the winners of shared noise.
    """
    if method not in (None, *ACCEPTANCE_METHODS):
        raise RequestError(f"acceptance method {method!r} is not known; choose one of {', '.join(ACCEPTANCE_METHODS)}")
    sampler = Sampler(params)
    if params.temperature == 0 and not sampler.adjusts:
        return GREEDY
    if keeps_text(params, method):
        # Nothing is drawn at temperature 0.
        seed = params.seed if params.seed is not None else 0 if params.temperature == 0 else secrets.randbits(64)
        return CoupledRule(sampler, past, SharedNoise(seed, race), len(past) if place is None else place)
    return BlockRule(sampler, past, np.random.default_rng(params.seed).random)


def keeps_text(params: SamplingParams, method: str | None) -> bool:
    """Whether drafts keep the text itself and not only its distribution: greedy, or chosen by shared noise."""
    return params.temperature == 0 or method == "coupled" or (method is None and params.seed is not None)
