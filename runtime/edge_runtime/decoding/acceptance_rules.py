"""How one request draws its drafts and which of them stand: greedy, by match, or by rejection. Remembers tokens for the penalties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge_runtime.decoding.acceptance import LogitRows, VerifyResult, accept_by_match, accept_by_rejection, accept_greedy
from edge_runtime.decoding.distribution import Distribution
from edge_runtime.decoding.sampling import NothingToDraw, Sampler, SamplingParams
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.interfaces import DraftSampler, Logits

ACCEPTANCE_METHODS = ("rejection", "match")
# The better one at temperatures 0.3, 0.7 and 1.0 (scripts/benchmarks/bench_sampling.py; README, results).
DEFAULT_ACCEPTANCE = "rejection"


class AcceptanceRule(Protocol):
    """Belongs to one request. A round asks `sampler` for each draft, in order, then `cut` once, then `accept` once."""

    any_prefix: bool  # whether drafts may be left unverified by what later ones look like, without moving the output's distribution

    @property
    def sampler(self) -> DraftSampler | None:
        """How the drafter picks a draft from its own logits; None: the likeliest."""

    def cut(self, drafts: list[int]) -> list[int]:
        """Returns the drafts that are worth verifying: those before the first that cannot stand whatever the target says."""

    def accept(self, drafts: Sequence[int], logits: LogitRows) -> VerifyResult:
        """Judges a round's drafts on the target's logits, float32 [len(drafts) + 1, vocabulary]; the verdict's tokens become the past."""


class GreedyRule:
    """The target's likeliest token, always. Looks at no distribution and keeps no past."""

    any_prefix = True
    sampler = None

    def cut(self, drafts: list[int]) -> list[int]:
        """All."""
        return drafts

    def accept(self, drafts: Sequence[int], logits: LogitRows) -> VerifyResult:
        """Accepts the longest prefix that the target would have chosen itself."""
        return accept_greedy(drafts, logits)


class _SampledRule:
    """The past that both sampled rules keep: the last tokens that the sampler's penalties look at, and the drafts of this round."""

    def __init__(self, sampler: Sampler, past: Sequence[int], random: Callable[[], float]) -> None:
        self._sampler = sampler
        self._random = random
        self._past: list[int] = []
        self._drawn: list[int] = []
        self._remember(past)

    def cut(self, drafts: list[int]) -> list[int]:
        """All."""
        return drafts

    def _recent(self, drafts: Sequence[int]) -> Sequence[int]:
        return [*self._past, *drafts] if self._sampler.window else ()

    def _target(self, drafts: Sequence[int], logits: LogitRows, position: int) -> Distribution:
        return self._sampler(logits[position], self._recent(drafts[:position]))

    def _remember(self, tokens: Sequence[int]) -> None:
        self._drawn.clear()
        if self._sampler.window:
            self._past = [*self._past, *tokens][-self._sampler.window :]


class MatchRule(_SampledRule):
    """Draws the target's token at each place and accepts the draft when it is the same; drafts are the drafter's likeliest tokens."""

    any_prefix = True

    @property
    def sampler(self) -> DraftSampler | None:
        """None unless bias or penalties move the likeliest token."""
        return self._choose if self._sampler.adjusts else None

    def accept(self, drafts: Sequence[int], logits: LogitRows) -> VerifyResult:
        """One random number per emitted token, so a seed gives the same output with any drafts and with none."""
        verdict = accept_by_match(drafts, lambda position: self._target(drafts, logits, position).draw(self._random()))
        self._remember([*drafts[: verdict.accepted], verdict.next_token])
        return verdict

    def _choose(self, logits: Logits, tokens: NDArray[np.integer] | None = None) -> int:
        self._drawn.append(self._sampler.likeliest(logits, self._recent(self._drawn), tokens))
        return self._drawn[-1]


class RejectionRule(_SampledRule):
    """Draws drafts from the drafter's distribution, under the same options as the target's, and accepts them by rejection sampling."""

    # A draft that is verified only if what followed it looked good is no longer drawn from what it was drawn from.
    any_prefix = False

    def __init__(self, sampler: Sampler, past: Sequence[int], random: Callable[[], float]) -> None:
        self._proposed: list[Distribution] = []
        super().__init__(sampler, past, random)

    @property
    def sampler(self) -> DraftSampler | None:
        """Draws and remembers what it drew from."""
        return self._choose

    def accept(self, drafts: Sequence[int], logits: LogitRows) -> VerifyResult:
        """Drafts that were not drawn (from a lookup, say) count as certain. Raises BackendError if drawn ones are missing or changed:
        the output would no longer have the target's distribution.
        """
        if self._drawn != list(drafts[: len(self._drawn)]):
            raise BackendError(f"the drafter drew {self._drawn} but returned {list(drafts)}; it must return all tokens it drew, in order")
        proposed = [*self._proposed, *(Distribution.certain(draft) for draft in drafts[len(self._drawn) :])]
        verdict = accept_by_rejection(drafts, proposed, lambda position: self._target(drafts, logits, position), self._random)
        self._proposed.clear()
        self._remember([*drafts[: verdict.accepted], verdict.next_token])
        return verdict

    def _choose(self, logits: Logits, tokens: NDArray[np.integer] | None = None) -> int | None:
        try:
            distribution = self._sampler(logits, self._recent(self._drawn), tokens)
        except NothingToDraw:  # every candidate is banned; the target may still have others
            return None
        self._proposed.append(distribution)
        self._drawn.append(distribution.draw(self._random()))
        return self._drawn[-1]


GREEDY = GreedyRule()


def acceptance_rule(params: SamplingParams, method: str, past: Sequence[int]) -> AcceptanceRule:
    """Returns the rule of one request after the tokens `past`. Raises RequestError for a method of another name."""
    if method not in ACCEPTANCE_METHODS:
        raise RequestError(f"acceptance method {method!r} is not known; choose one of {', '.join(ACCEPTANCE_METHODS)}")
    sampler = Sampler(params)
    if params.temperature == 0 and not sampler.adjusts:
        return GREEDY
    random = np.random.default_rng(params.seed).random
    return (RejectionRule if method == "rejection" else MatchRule)(sampler, past, random)
