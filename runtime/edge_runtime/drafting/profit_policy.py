"""Draft length by measured profit: a token is drafted and verified if its expected gain exceeds its cost on this machine.

Where no draft seems to pay, the policy sometimes drafts anyway to find out if that is still true.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.drafting.acceptance_model import Acceptance, Chances, Forecast
from edge_runtime.drafting.cost_model import Costs
from edge_runtime.drafting.energy_objective import TimeBound
from edge_runtime.drafting.policies import RoundPlan, RoundResult
from edge_runtime.interfaces import ShouldContinue, StopNumbers

# Questions: rounds that draft a few tokens although no draft seems to pay. Without them, an unlucky start or wrongly computed costs would
# end drafting for good.

# Rounds without a draft before the first question, and the longest wait after repeated doubling.
FIRST_WAIT, LONGEST_WAIT = 4, 32
# A question may cost this share of a plain round. A more expensive one waits until it costs DEAR_SHARE of the rounds since the last draft.
ASK_SHARE, DEAR_SHARE = 0.35, 0.01
# The most tokens of a question; and how many the first rounds draft if nothing was measured yet, whatever the computed costs are.
ASK_LENGTH, START_LENGTH = 3, 2


class AskSchedule:
    """Decides when to ask: after 4, 8, 16, then always 32 rounds without drafts, and at once after a question with an accepted token."""

    def __init__(self) -> None:
        self._quiet, self._wait = 0, FIRST_WAIT

    def is_due(self, cost: float, *, is_dear: bool) -> bool:
        """Whether to ask now. `cost` is in plain rounds; an expensive question (`is_dear`) waits for more rounds (DEAR_SHARE)."""
        return self._quiet >= self._wait and (not is_dear or self._quiet * DEAR_SHARE >= cost)

    def begin_request(self) -> None:
        """Shortens the wait, because a new text begins, about which the previous one says little."""
        self._wait = min(self._wait, FIRST_WAIT)

    def count_plain(self) -> None:
        """Counts a round without drafts of the drafter."""
        self._quiet += 1

    def count_draft(self) -> None:
        """Counts a round that drafted because drafting pays."""
        self._quiet, self._wait = 0, FIRST_WAIT

    def count_question(self, accepted: int) -> None:
        """Counts a round that asked."""
        self._quiet, self._wait = 0, 0 if accepted else min(max(2 * self._wait, FIRST_WAIT), LONGEST_WAIT)


# The policy.
#
# A round is a renewal: it emits 1 + (accepted drafts) tokens and costs its draft steps and one verify. At a reference rate r, a round is
# worth E[tokens] - r E[cost], and a step pays if it increases that (Ross, Applied Probability Models, renewal reward; Dinkelbach 1967). r
# is the rate of the newest rounds, but at least that of plain decoding. Before each draft step, the policy computes for each confidence bin
# of the next draft the larger of two worths: of stopping there, and of the best longer draft. After the last step, the most valuable prefix
# of the draft is verified.
#
# Where several requests share their forwards, a request's cost is its share of a plain verify, and what the rows of its drafts add to it.

# The sums over earlier rounds are multiplied by this after each round: a window of 50 rounds.
RATE_DECAY = 0.98
# Before the first round, the predicted rate of the best fixed length counts as this many plain rounds.
PREDICTED_ROUNDS = 5.0
# Trials are rounds with a number of rows that has too few timings. They may lose this share of the cost of all rounds.
TRIAL_SHARE = 0.02
# A doubtful trial may take only this share of the budget: one that would not pay even if its verify took half as long as assumed, or one
# that only adds padding.
DOUBTFUL_SHARE = 0.1
# Rounds between two checks whether a trial is due, because a check takes long.
TRIAL_INTERVAL = 4
# While drafts are made only to ask, older observations of first drafts count as at most this many.
STALE = 6.0
# Whether a first draft pays is computed at this many times the rate, so that the answer is still valid when the rate changes a little.
RATE_MARGIN = 1.1
# Costs and acceptance change slowly. They are computed again when a request begins, and after this many rounds with drafts. The first
# rounds teach most about provisional costs, so these are computed again after 1, 2, 4, 8 and then always 16 such rounds.
REFRESH, LONGEST_REFRESH = 8, 16
# The longest draft of a pair without any measurements, until its first draft is accepted.
UNTRIED_LENGTH = 3
EVEN_CHANCE = 0.5


def expected_rate(costs: Costs, model: Acceptance, lengths: Sequence[int]) -> float:
    """Returns the expected tokens per unit of cost of rounds with the best of these draft lengths."""
    known = model.forecast(max(lengths))
    best = 0.0
    for length in lengths:
        tokens = 1.0 + float((1.0 + known.further[length - 1]) @ (known.first * known.accept_prob)) if length else 1.0
        cost = costs.draft(length) + min(costs.verify(rows) for rows in range(length + 1, max(lengths) + 2))
        best = max(best, tokens / cost)
    return best


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The figures behind the last round.

    `mode` is "plain", "shadow" (see `RoundPlan`), "draft", "offer" (tokens that no drafter drafted), "trial" (a number of rows that needs
    timings) or "ask" (a few drafts to find out if they pay after all). `verified` of the `drafted` tokens were sent to the target, plus
    `padding` dummy rows. `expected` is the number of emitted tokens that was expected when the draft ended, `cost` the expected cost. Rates
    are tokens per unit of cost.
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


class _StepRule:
    """Lets a drafter ask the policy whether to draft on. Implements `interfaces.StopRule`."""

    def __init__(self, policy: Profit) -> None:
        self._policy = policy

    def __call__(self, probability: float) -> bool:
        return self._policy.continues(probability)

    def numbers(self) -> StopNumbers:
        return self._policy.numbers()

    def take(self, probabilities: Sequence[float]) -> None:
        for probability in probabilities:
            self._policy.add_confidence(probability)


class Profit:
    """The policy for the requests of one session; it learns from all of them. Implements `policies.WeighingPolicy`.

    Where drafting does not seem to pay, it asks now and then: it drafts and verifies a few tokens anyway (`AskSchedule`). If even one is
    too expensive to verify, it makes a shadow draft: one drafted token is not verified, but compared with the token of plain decoding.
    """

    def __init__(
        self,
        costs: Costs,
        model: Acceptance,
        *,
        longest: int = MAX_DRAFT_LENGTH,
        stepwise: bool = True,
        max_rows: int | None = None,
        bound: TimeBound | None = None,
    ) -> None:
        """`longest`: the longest draft, 0 without a drafter; `max_rows`: the most tokens to verify, drafts or offered (None: `longest`).

        `stepwise`: the drafter calls `should_continue` after each drafted token; otherwise `plan` fixes the length. `bound` may change the
        costs before each round.
        """
        self._costs = costs
        self._bound = bound
        self._model = model
        self._longest = longest
        self._max_rows = max(longest, max_rows or 0)
        self._stepwise = stepwise
        # The cost that trials may still lose, and the rows of this round's trial, 0 for none.
        self._trial_budget = 0.0
        self._trial_rows = 0
        self._length = 0
        self._mode = "plain"
        self._forecast = model.forecast(longest)
        self._until_refresh = 0
        self._is_new = True  # no round was observed yet
        self._has_news = True  # forecast and costs were not yet computed, or rounds with drafts were observed since
        self._stale = True  # the reference rate must be updated before the next plan
        self._requests = self._priced_requests = 1  # of the next round, and those that `_row_costs` are for
        self._cheapest_rows = [0] * (self._max_rows + 1)  # by number of drafts, how many rows after the first one cost least
        # Costs of verifying n drafts, and of drafting them.
        self._row_costs: Chances = np.zeros(self._max_rows + 1)
        self._draft_costs: Chances = np.zeros(longest + 1)
        # The same as Python lists, of which single elements are faster to read; and by draft length, a round's expected tokens and costs.
        self._row_list: list[float] = self._row_costs.tolist()
        self._draft_list: list[float] = self._draft_costs.tolist()
        self._length_tokens, self._length_costs = [1.0], [0.0]
        # The highest rate at which a first draft is known to pay, the lowest at which it is known not to, and the figures they depend on.
        self._pays, self._pays_not, self._paying_at = 0.0, math.inf, (self._row_costs, True)
        self._any_untimed, self._until_trial = True, 0
        self._schedule = AskSchedule()
        # Whether nothing was measured and no draft accepted yet; and whether costs are provisional and nothing was drafted yet.
        self._is_untried, self._starts = costs.is_provisional and not model.is_measured, costs.is_provisional
        self._refresh, self._longest_refresh = (1, LONGEST_REFRESH) if costs.is_provisional else (REFRESH, REFRESH)
        self._tokens_reached = self._cost_reached = 0.0
        self._rate = self._plain_rate = 0.0
        self._offer: Sequence[float] = ()
        self._tables: tuple[Forecast | None, Chances, tuple[Chances, ...]] = (None, self._row_costs, ())
        # A drafter can decide by itself only with a model of confidences; a model of positions has no bounds.
        self._rule: ShouldContinue = _StepRule(self) if len(model.bounds) else self.continues
        self._begin_round(any_prefix=True)

    def _begin_round(self, *, any_prefix: bool) -> None:
        self._any_prefix = any_prefix
        self._bins: list[int] = []
        self._confidences: list[float] = []
        self._chain = 1.0
        self._all_added = False  # whether all tokens of the round are in `_tokens`
        # By n, the expected number of emitted tokens if the first n drafts are verified; the worth and the length of the best prefix.
        self._tokens = [1.0]
        self._worth = 1.0 - self._rate * self._row_list[0]
        self._verified = 0

    def plan(self, requests: int = 1, *, any_prefix: bool = True) -> RoundPlan:
        """Plans a draft if drafting pays; otherwise plain decoding, or now and then a question or a trial.

        Offered tokens are verified instead if that is worth more: they need no drafting.
        """
        offer, self._offer = self._offer, ()
        if requests != self._requests:
            self._requests, self._stale, self._until_refresh = requests, True, 0
        stale = self._stale or any_prefix != self._any_prefix
        if stale:
            self._update_rate()
        self._begin_round(any_prefix=any_prefix)
        if stale:  # otherwise nothing has changed since drafting did not pay
            self._length = self._first_length()
        if offer and (offered := self._offered(offer)):
            self._mode, self._all_added = "offer", True
            return RoundPlan(0, to_verify=self._to_verify, offered=offered)
        if requests == 1 and not self._starts and (rows := self._trial()):
            self._mode, self._trial_rows = "trial", rows
            return RoundPlan(min(rows - 1, self._longest), False, self._rule, self._to_verify)
        if self._length:
            self._mode, length = "draft", min(self._length, UNTRIED_LENGTH) if self._is_untried else self._length
        else:
            self._mode, length = self._question()
        rule = self.continues if self._mode == "ask" else self._rule
        return RoundPlan(length, self._mode == "shadow", rule, self._to_verify, extend=self._extend)

    def _question(self) -> tuple[str, int]:
        """Returns the mode and the draft length of a round in which no draft seems to pay."""
        if not self._longest:
            return "plain", 0
        if self._starts:
            return "ask", min(START_LENGTH, self._longest)
        probe = self._draft_list[1] * self._plain_rate
        # A bound on time mixes rounds with and without drafts on purpose. There a probe must be rare both by seconds and by joules.
        if self._bound is not None and not (self._bound.is_plain_fastest or self._bound.is_time_alone):
            is_due = self._schedule.is_due(max(probe, self._bound.probe_cost), is_dear=True)
            return ("shadow", 1) if is_due else ("plain", 0)
        if not self._schedule.is_due(probe, is_dear=probe > ASK_SHARE):
            return "plain", 0
        length = self._affordable(ASK_LENGTH, ASK_SHARE)
        return ("ask", length) if length else ("shadow", 1)

    def _affordable(self, longest: int, share: float) -> int:
        """Returns how many tokens, up to `longest`, can be drafted and verified for at most this share of a plain round's cost."""
        drafts = self._draft_costs[1 : longest + 1]
        costs = drafts + self._row_costs[1 : len(drafts) + 1] - self._row_costs[0]
        return int((costs <= share * self._row_costs[0]).sum())

    def begin_request(self) -> None:
        """Prepares for a new text: questions come sooner again, and what was learned is computed now, while no token waits for it."""
        self._schedule.begin_request()
        if self._has_news:
            self._until_refresh = 0
            self._update_rate()
            self._length = self._first_length()

    def offer(self, chances: Sequence[float]) -> None:
        """Offers tokens to the next plan."""
        self._offer = chances

    def _trial(self) -> int:
        """Returns how many rows the round should verify to time them, 0 for no trial. Takes the expected loss from the budget."""
        if not self._any_untimed or self._until_trial > 0:
            self._until_trial -= 1
            return 0
        self._until_trial = TRIAL_INTERVAL
        untimed = self._costs.rows_to_time(self._max_rows + 1) if self._longest else []
        self._any_untimed = bool(untimed)  # once False it stays so, because timings are never removed
        # Worths are relative to a plain round here. A round at the reference rate is worth 0, which is this much more than a plain one.
        best = max(*self._worth_of_lengths(), self._rate * self._row_list[0] - 1)
        for rows in untimed:
            drafts = min(rows - 1, self._longest)
            costs = self._draft_list[drafts] + self._row_list[rows - 1]
            worth = self._length_tokens[drafts] - 1 - self._rate * (costs - self._row_list[0])
            lost = max(best - worth, 0.0) / self._rate
            is_likely = drafts == rows - 1 and lost < self._row_list[rows - 1] / 2
            if lost <= self._trial_budget * (1.0 if is_likely else DOUBTFUL_SHARE):
                self._trial_budget -= lost
                return rows
        return 0

    def _offered(self, offer: Sequence[float]) -> int:
        """Returns how many offered tokens to verify, and keeps them as the round's tokens; 0 if a draft or plain decoding is worth more."""
        at_most = self._worth + sum(accumulate(offer, operator.mul)) - self._rate * (self._row_list[1] - self._row_list[0])
        if self._length and at_most <= self._worth + max(self._worth_of_lengths()):
            return 0  # a shortcut: even a draft of a fixed length is worth more
        drafting = self._worth_of_drafting()
        for chance in offer[: self._max_rows]:
            self._add(chance, may_leave_out=True)
        if self._verified and self._worth > drafting:
            return self._verified
        self._begin_round(any_prefix=self._any_prefix)
        return 0

    def _worth_of_drafting(self) -> float:
        if not self._length:
            return self._worth
        if self._stepwise:
            return self._worth + self._gain_of_first_draft(self._rate)
        return self._worth + self._worth_of_lengths()[self._length]

    def _extend(self, drafted: int, chances: Sequence[float]) -> int:
        """Returns how many of the offered tokens after the drafts to verify with them."""
        if self._mode == "shadow":
            return 0
        self._add_unreported(drafted)
        self._all_added = True
        if self._verified < drafted:  # not even all drafts before them are worth verifying
            return 0
        for chance in chances[: self._max_rows - drafted]:
            self._add(chance, may_leave_out=True)
        return self._verified - drafted

    def _first_length(self) -> int:
        """Returns the longest draft to allow, 0 if not even one token pays."""
        if not self._longest:
            return 0
        if self._stepwise:
            return self._longest if self._first_step_pays() else 0
        worth = self._worth_of_lengths()
        return worth.index(max(worth))  # the first one is 0

    def _first_step_pays(self) -> bool:
        """Whether a first draft adds to the worth of the round.

        The higher the rate, the less it adds. So the known bounds (`_pays`, `_pays_not`) answer for many rounds.
        """
        holds_for = self._row_costs, self._any_prefix
        if self._paying_at[0] is not holds_for[0] or self._paying_at[1] != holds_for[1]:
            self._pays, self._pays_not, self._paying_at = 0.0, math.inf, holds_for
        for rate in (self._rate * RATE_MARGIN, self._rate):
            if self._pays < self._rate < self._pays_not:
                if self._gain_of_first_draft(rate) > 0:
                    self._pays = rate
                else:
                    self._pays_not = rate
        return self._rate <= self._pays

    def _update_rate(self) -> None:
        """Updates the reference rate and, every `_refresh` calls, the forecast and the costs."""
        self._stale = False
        self._until_refresh -= 1
        if self._until_refresh < 0:
            self._forecast, self._until_refresh = self._model.forecast(self._longest), self._refresh - 1
            self._has_news = False
            self._refresh = min(2 * self._refresh, self._longest_refresh)
            if self._bound is not None:
                rows, drafts = self._max_rows + 1, self._longest
                self._bound.renew(self._forecast, rows=rows, drafts=drafts, requests=self._requests, stepwise=self._stepwise)
                self._bound.choose()
            self._update_row_costs()
        elif self._bound is not None and self._bound.choose():
            self._update_row_costs()
        reached = self._bound.rate if self._bound is not None else self._tokens_reached / self._cost_reached
        self._rate = max(self._plain_rate, reached)

    def _update_row_costs(self) -> None:
        costs = np.array([self._costs.share(rows, self._requests) for rows in range(1, self._max_rows + 2)])
        if not self._is_new and self._requests == self._priced_requests:
            # Scales the costs of earlier rounds to what a plain round is known to cost now.
            self._cost_reached *= float(costs.min()) / self._row_list[0]
        self._priced_requests = self._requests
        # The cost of n rows, or of a larger batch if that is cheaper.
        self._row_costs = np.minimum.accumulate(costs[::-1])[::-1]
        self._row_list = self._row_costs.tolist()
        self._cheapest_rows = [n + int(costs[n:].argmin()) for n in range(len(costs))]
        self._draft_list = [self._costs.draft(n, self._requests) for n in range(self._longest + 1)]
        self._draft_costs = np.array(self._draft_list)
        self._length_tokens = self._tokens_of_lengths().tolist()
        self._length_costs = (self._draft_costs + self._row_costs[: self._longest + 1]).tolist()
        self._plain_rate = 1 / self._row_list[0]
        if self._is_new:
            self._predict_rate()

    def _predict_rate(self) -> None:
        """Sets the rate before the first round: the predicted one of the best fixed length."""
        self._cost_reached = PREDICTED_ROUNDS * self._row_list[0]
        self._tokens_reached = max(map(operator.truediv, self._length_tokens, self._length_costs)) * self._cost_reached

    def _tokens_of_lengths(self) -> Chances:
        """Returns the expected tokens of rounds of 0 to `longest` drafts."""
        known = self._forecast
        return np.concatenate(([1.0], 1.0 + (1.0 + known.further[: self._longest]) @ (known.first * known.accept_prob)))

    def _worth_of_lengths(self) -> list[float]:
        """Returns by how much a round of 0 to `longest` drafts is worth more than a plain one."""
        rate, plain = self._rate, 1.0 - self._rate * self._length_costs[0]
        return [tokens - rate * cost - plain for tokens, cost in zip(self._length_tokens, self._length_costs, strict=True)]

    def _gain_of_first_draft(self, rate: float) -> float:
        """Returns what a first draft adds to the worth of a round at this rate."""
        return self._gain_after([1.0], 1.0, 1.0 - rate * self._row_list[0], self._forecast.first, rate)

    def _gain_of_next_draft(self) -> float:
        """Returns what another draft adds to the worth of the round."""
        return self._gain_after(self._tokens, self._chain, self._worth, self._forecast.transition[self._bins[-1]], self._rate)

    def _gain_after(self, tokens_so_far: Sequence[float], chain: float, reached: float, next_bin: Chances, rate: float) -> float:
        """Returns what another draft adds, at this rate, to the worth that a round has `reached`.

        `tokens_so_far` [drafts + 1]: by n, the expected tokens if the first n drafts are verified; `chain`: the probability that all drafts
        so far are accepted; `next_bin` [bins]: the probabilities of the next draft's bin.
        """
        known, drafted = self._forecast, len(tokens_so_far) - 1
        drafts = self._draft_costs[drafted + 1 :]
        chains = chain * known.accept_prob
        tokens = tokens_so_far[-1] + chains
        worth = tokens - rate * self._row_costs[drafted + 1]
        if self._any_prefix:
            worth = np.maximum(worth, reached)
        left = self._longest - drafted - 1
        if left:
            spent = rate * (self._row_costs[drafted + 2 : self._longest + 1] + drafts[1:] - drafts[0])
            further = tokens + chains * known.further[1 : left + 1] - spent[:, None]
            worth = np.maximum(worth, further.max(axis=0))
        return float(next_bin @ worth) - rate * float(drafts[0] - self._draft_costs[drafted]) - reached

    def numbers(self) -> StopNumbers:
        known = self._forecast
        if self._tables[0] is not known or self._tables[1] is not self._row_costs:
            parts = (self._model.bounds, self._row_costs, self._draft_costs, known.accept_prob, known.transition, known.further)
            self._tables = known, self._row_costs, tuple(np.ascontiguousarray(part, np.float64) for part in parts)
        # In a trial, the rate is 0, as if drafts cost nothing, so that the rule never ends the draft.
        return StopNumbers(self._tables[2], 0.0 if self._mode == "trial" else self._rate, self._any_prefix)

    def add_confidence(self, confidence: float) -> None:
        """Adds a drafted token to the round by the drafter's probability of it."""
        self._add_draft(self._model.bin_of(confidence, len(self._bins)))
        self._confidences.append(confidence)

    def continues(self, confidence: float) -> bool:
        """Adds a drafted token as `add_confidence` does; returns whether drafting another one pays."""
        self.add_confidence(confidence)
        if self._mode == "shadow" or len(self._bins) >= self._longest:
            return False
        if self._mode == "trial":
            return True
        if self._mode == "ask":  # goes on as long as the next draft will probably be compared: all before it must be accepted
            return self._starts or self._chain > EVEN_CHANCE
        return self._gain_of_next_draft() > 0

    def _add_draft(self, index: int) -> None:
        """Adds a draft in this bin to the round."""
        self._bins.append(index)
        self._add(float(self._forecast.accept_prob[index]), may_leave_out=self._any_prefix)

    def _add(self, chance: float, *, may_leave_out: bool) -> None:
        """Adds a token and updates the best prefix. `chance`: the probability that it is accepted if those before it are."""
        self._chain *= chance
        self._tokens.append(self._tokens[-1] + self._chain)
        count = len(self._tokens) - 1
        worth = self._tokens[-1] - self._rate * self._row_list[count]
        if worth > self._worth or not may_leave_out:
            self._worth, self._verified = worth, count

    def _to_verify(self, drafted: int) -> tuple[int, int]:
        """Returns how many drafts to verify, as later ones cost more than they are expected to bring; and how many padding rows to add."""
        if not self._all_added:
            self._add_unreported(drafted)
        if self._mode in ("trial", "ask"):
            self._verified = drafted
        verified = min(self._verified, drafted)
        return verified, self._padding(verified)

    def _padding(self, verified: int) -> int:
        if self._mode == "trial":
            return max(0, self._trial_rows - 1 - verified)
        return self._cheapest_rows[verified] - verified

    def _add_unreported(self, drafted: int) -> None:
        """Adds the drafts of a drafter that does not call `should_continue`."""
        while len(self._bins) < drafted:
            self._add_draft(self._model.bin_of(1.0, len(self._bins)))

    def observe(self, result: RoundResult) -> None:
        """Learns from a round: acceptance, rate and costs."""
        self._verified, self._is_new = result.verified, False
        verified = result.verified
        if (timing := result.timing) is not None:
            self._costs.learn(timing)
        if self._mode == "shadow":
            self._add_unreported(1)
        if self._bins:
            self._observe_drafts(result)
        self._stale = self._stale or self._mode == "offer"
        self._count_round(result)
        # The mean of predicted and emitted tokens: the prediction says as much about the rate as the outcome, and varies less.
        tokens = (self._tokens[verified] + result.accepted + 1) / 2
        self._tokens_reached = RATE_DECAY * self._tokens_reached + tokens
        self._cost_reached = RATE_DECAY * self._cost_reached + self._spent()
        if self._bound is not None:
            promised = self._tokens[verified] if self._mode == "draft" else 0.0
            rows = verified + self._padding(verified)
            self._bound.spend(tokens, len(self._bins), rows, promised, shadow=self._mode == "shadow")
            self._stale = self._stale or not self._bound.is_time_alone

    def _observe_drafts(self, result: RoundResult) -> None:
        """Learns from the drafts of the drafter, and from the first draft that was not verified if it is known to be right or wrong."""
        if self._mode in ("shadow", "ask"):
            self._until_refresh = 0  # the next plan computes forecast and costs again
            # An unlucky start must not end drafting, so old observations fade. They do not while a bound on time mixes rounds with and
            # without drafts, since it needs them all.
            if self._bound is None or self._bound.is_plain_fastest or self._bound.is_time_alone:
                self._model.fade(STALE)
        self._stale = self._has_news = True
        compared, right = min(result.verified, len(self._bins)), min(result.accepted, len(self._bins))
        if result.left_out_right is not None and compared < len(self._bins):
            compared, right = compared + 1, right + result.left_out_right
        self._model.observe(self._bins, compared, right)

    def _count_round(self, result: RoundResult) -> None:
        """Updates the schedule of questions and the budget of trials."""
        if self._mode in ("shadow", "ask") and self._bins:
            self._schedule.count_question(result.accepted)
        elif self._mode == "draft" and self._bins:
            self._schedule.count_draft()
        else:
            self._schedule.count_plain()
        if self._bins:
            self._starts = False
            self._is_untried = self._is_untried and not result.accepted
        self._trial_budget += TRIAL_SHARE * self._spent()

    def _spent(self) -> float:
        """Returns the cost of the round by the cost model. A shadow draft is not counted: it would make plain rounds seem worse."""
        steps = 0 if self._mode == "shadow" else len(self._bins)
        return self._draft_list[steps] + self._row_list[self._verified]

    @property
    def last(self) -> Decision:
        """The decision of the last round, for `edge-run generate --explain`."""
        verified = self._verified
        return Decision(
            mode=self._mode,
            drafted=len(self._bins),
            verified=verified,
            padding=self._padding(verified),
            expected=self._tokens[verified],
            cost=self._spent(),
            plain_rate=self._plain_rate,
            best_rate=self._rate,
            confidences=tuple(self._confidences),
        )
