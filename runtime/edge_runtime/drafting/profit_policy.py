"""Draft length by measured profit: a token is drafted, and verified, where what it is likely to bring exceeds what it costs on this machine.

A round is a renewal: it emits 1 + (accepted drafts) tokens and costs its draft steps and one verify. At the rate r that is reached otherwise,
a round is worth E[tokens] - r E[cost], and what adds to that pays (Ross, Applied Probability Models, renewal reward; Dinkelbach 1967). r is
what the newest rounds reached, plain decoding at least. Before each draft step it looks one step ahead: for each kind of draft that may
come, the best of stopping there and of any further length; after the last, of all prefixes of the draft the most valuable one is verified.

Where N requests share their forwards each weighs an Nth of a verify of N times its rows, as if the others did as it does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.drafting.acceptance_model import Acceptance, Chances
from edge_runtime.drafting.cost_model import Costs
from edge_runtime.drafting.policies import RoundPlan, RoundResult

# Share of what earlier rounds reached that is left after another: a memory of 50 rounds.
RATE_DECAY = 0.98
# Before any round, the best fixed length's rate counts as this many plain rounds.
PREDICTED_ROUNDS = 5.0
# What finding the way back to drafting may cost, in plain rounds: per emitted token, and saved up at most.
BUDGET_PER_TOKEN, MAX_BUDGET = 0.01, 2.0
# While nothing is drafted, what was seen before of first drafts counts as at most this many observations.
STALE = 6.0
# What rows cost and drafts bring changes slowly; it is computed anew after so many rounds that drafted.
REFRESH = 8


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Why the last round drafted as it did. Rates are tokens per unit of cost, `mode` is "plain", "shadow" or "draft".

    Of `drafted` tokens the first `verified` were verified, with `padding` rows more. `expected` are the tokens the round was expected to
    emit when its draft ended, `cost` what it was expected to cost.
    """

    mode: str
    drafted: int
    verified: int
    padding: int
    expected: float
    cost: float
    plain_rate: float
    best_rate: float
    confidences: tuple[float, ...]


class Profit:
    """Implements `policies.DraftLengthPolicy` for the requests of one session: what it learns from one serves the next.

    Where drafting does not pay it *listens* now and then: one token is drafted and not verified, only compared with the token that
    plain decoding then brings. That costs a draft step, far less than verifying drafts, and tells when drafts would be accepted again.
    """

    def __init__(self, costs: Costs, model: Acceptance, *, longest: int = MAX_DRAFT_LENGTH, stepwise: bool = True) -> None:
        """`longest` bounds a draft. `stepwise`: the drafter asks `should_continue` after each draft; otherwise the length is decided before."""
        self._costs = costs
        self._model = model
        self._longest = longest
        self._stepwise = stepwise
        # In plain rounds: what may be spent on listening, and what listening costs.
        self._credit = self._price = 0.0
        self._most = 0
        self._mode = "plain"
        self._forecast = model.forecast(longest)
        self._unread = 0
        self._stale = True
        self._requests = 1
        self._rows = np.zeros(longest + 1, np.intp)
        # Of verifying n drafts, and of drafting them.
        self._row_costs: Chances = np.zeros(longest + 1)
        self._draft_costs: Chances = np.zeros(longest + 1)
        self._tokens_reached = self._cost_reached = 0.0
        self._rate = self._plain_rate = 0.0
        self._begin(any_prefix=True)

    def _begin(self, *, any_prefix: bool) -> None:
        self._any_prefix = any_prefix
        self._kinds: list[int] = []
        self._confidences: list[float] = []
        self._chain = 1.0
        # Expected tokens, and worth, of verifying the first n drafts; of those the best.
        self._tokens = [1.0]
        self._worth = 1.0 - self._rate * float(self._row_costs[0])
        self._verified = 0

    def plan(self, requests: int = 1, *, any_prefix: bool = True) -> RoundPlan:
        """Plans a draft where drafting pays; otherwise plain decoding, or a shadow draft when the probing budget allows one."""
        if requests != self._requests:
            self._requests, self._stale, self._unread = requests, True, 0
        stale = self._stale or any_prefix != self._any_prefix
        if stale:
            self._weigh()
        self._begin(any_prefix=any_prefix)
        if stale:  # otherwise nothing was drafted since it last was not worth it
            self._most = self._first_length()
        if self._most:
            self._mode, length = "draft", self._most
        else:
            self._price = float(self._draft_costs[1]) * self._plain_rate if self._longest else MAX_BUDGET
            self._mode = "shadow" if self._credit >= self._price else "plain"
            length = int(self._mode == "shadow")
        return RoundPlan(length, self._mode == "shadow", self._should_continue, self._to_verify)

    def _first_length(self) -> int:
        """The most to draft, 0 where not even one draft pays."""
        if not self._longest:
            return 0
        if self._stepwise:
            return self._longest if self._gain_of_a_step(self._forecast.first) > 0 else 0
        worth = self._worth_of_lengths()
        best = int(worth.argmax())
        return best if worth[best] > 0 else 0

    def _weigh(self) -> None:
        """Looks anew at which rate there is to beat and, now and then, at what rows cost and drafts bring."""
        self._stale = False
        self._unread -= 1
        if self._unread < 0:
            self._forecast, self._unread = self._model.forecast(self._longest), REFRESH
            self._weigh_rows()
        self._rate = max(self._plain_rate, self._tokens_reached / self._cost_reached)

    def _weigh_rows(self) -> None:
        costs = np.array([self._verify(rows) for rows in range(1, self._longest + 2)])
        # Of n rows and all larger batches the cheapest.
        self._row_costs = np.minimum.accumulate(costs[::-1])[::-1]
        self._rows = np.array([n + int(costs[n:].argmin()) for n in range(len(costs))])
        self._draft_costs = np.array([self._costs.draft(n, self._requests) for n in range(len(costs))])
        self._plain_rate = 1 / float(self._row_costs[0])
        if not self._cost_reached:
            self._foresee()

    def _foresee(self) -> None:
        """Before any round: the rate of the best fixed length, as far as one knows."""
        rates = self._tokens_of_lengths() / (self._draft_costs + self._row_costs)
        self._cost_reached = PREDICTED_ROUNDS * float(self._row_costs[0])
        self._tokens_reached = float(rates.max()) * self._cost_reached

    def _tokens_of_lengths(self) -> Chances:
        """Expected tokens of rounds of 0 to `longest` drafts, before anything is drafted."""
        known = self._forecast
        return np.concatenate(([1.0], 1.0 + (1.0 + known.further[: self._longest]) @ (known.first * known.stands)))

    def _worth_of_lengths(self) -> Chances:
        """How much more rounds of 0 to `longest` drafts are worth than a plain one."""
        worth = self._tokens_of_lengths() - self._rate * (self._draft_costs + self._row_costs)
        return np.asarray(worth - worth[0])

    def _gain_of_a_step(self, kinds: Chances) -> float:
        """What drafting another adds to the round's worth, if it is of these kinds [kinds] with these chances."""
        known, drafted, rate = self._forecast, len(self._kinds), self._rate
        drafts = self._draft_costs[drafted + 1 :]
        chains = self._chain * known.stands
        tokens = self._tokens[-1] + chains
        worth = tokens - rate * self._row_costs[drafted + 1]
        if self._any_prefix:
            worth = np.maximum(worth, self._worth)
        left = self._longest - drafted - 1
        if left:
            spent = rate * (self._row_costs[drafted + 2 :] + drafts[1:] - drafts[0])
            further = tokens + chains * known.further[1 : left + 1] - spent[:, None]
            worth = np.maximum(worth, further.max(axis=0))
        return float(kinds @ worth) - rate * float(drafts[0] - self._draft_costs[drafted]) - self._worth

    def _should_continue(self, confidence: float) -> bool:
        """Takes the drafter's probability of the token it just drafted; returns whether drafting another pays."""
        self._draft_of(self._model.kind(confidence, len(self._kinds)))
        self._confidences.append(confidence)
        if self._mode == "shadow" or len(self._kinds) >= self._longest:
            return False
        return self._gain_of_a_step(self._forecast.follows[self._kinds[-1]]) > 0

    def _draft_of(self, kind: int) -> None:
        """Takes in that another token was drafted."""
        self._kinds.append(kind)
        self._chain *= float(self._forecast.stands[kind])
        self._tokens.append(self._tokens[-1] + self._chain)
        worth = self._tokens[-1] - self._rate * float(self._row_costs[len(self._kinds)])
        if worth > self._worth or not self._any_prefix:
            self._worth, self._verified = worth, len(self._kinds)

    def _to_verify(self, drafted: int) -> tuple[int, int]:
        """Returns how many drafts to verify, because those after them cost more than they are likely to bring, and the padding rows."""
        self._draft_unasked(drafted)
        verified = min(self._verified, drafted)
        return verified, self._padding(verified)

    def _padding(self, verified: int) -> int:
        return int(self._rows[verified]) - verified

    def _draft_unasked(self, drafted: int) -> None:
        """Adds the drafts of a drafter that does not call `should_continue`."""
        while len(self._kinds) < drafted:
            self._draft_of(self._model.kind(1.0, len(self._kinds)))

    def observe(self, result: RoundResult) -> None:
        """Learns from a round: acceptance, rate and costs."""
        shadow = self._mode == "shadow"
        if result.shadow_accepted is not None:
            self._observe_shadow(result.shadow_accepted)
        if (timing := result.timing) is not None:
            self._costs.learn(timing)
            if shadow and timing.verify_seconds > 0:
                self._price = min(timing.draft_seconds / timing.verify_seconds, MAX_BUDGET)
        self._verified = verified = result.verified
        if self._kinds and not shadow:
            self._stale = True
            self._model.observe(self._kinds, verified, result.accepted)
        if self._mode != "draft":
            self._credit = min(self._credit + BUDGET_PER_TOKEN, MAX_BUDGET) - (self._price if shadow else 0.0)
        # The prediction says as much about the rate as the outcome, and varies less.
        tokens = (self._tokens[verified] + result.accepted + 1) / 2
        self._tokens_reached = RATE_DECAY * self._tokens_reached + tokens
        self._cost_reached = RATE_DECAY * self._cost_reached + self._spent()

    def _observe_shadow(self, accepted: bool) -> None:
        """Learns from a shadow draft; the next plan computes everything anew."""
        self._stale, self._unread = True, 0
        self._draft_unasked(1)
        self._model.fade(STALE)
        self._model.observe(self._kinds[:1], 1, int(accepted))

    def _spent(self) -> float:
        """The cost of the round according to the cost model. Shadow drafts are paid from the probing budget instead."""
        steps = 0 if self._mode == "shadow" else len(self._kinds)
        return float(self._draft_costs[steps] + self._row_costs[self._verified])

    @property
    def last(self) -> Decision:
        """What was decided in the last round, for those who want to know why."""
        verified = self._verified
        return Decision(
            mode=self._mode,
            drafted=len(self._kinds),
            verified=verified,
            padding=self._padding(verified),
            expected=self._tokens[verified],
            cost=self._spent(),
            plain_rate=self._plain_rate,
            best_rate=self._rate,
            confidences=tuple(self._confidences),
        )

    def _verify(self, rows: int) -> float:
        """This request's share of a verify in which all that share it bring so many rows: their own numbers are not known yet."""
        return self._costs.verify(rows * self._requests) / self._requests
