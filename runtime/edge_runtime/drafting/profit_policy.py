"""Draft length by measured profit: draft and verify a token where its gain exceeds its cost here; and when to ask again nevertheless."""

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

# When a policy drafts although no draft seems to pay: an unlucky start, or wrongly computed costs, must not end drafting for good.

# Rounds without a draft before the policy asks: at first, and the most after they were doubled again and again.
FIRST_WAIT, LONGEST_WAIT = 4, 32
# What a question may cost of a plain round; what costs more waits until it is the second share of the rounds before it.
ASK_SHARE, DEAR_SHARE = 0.35, 0.01
# The most tokens that are drafted to ask, and how many are where nothing was measured yet, whatever was computed.
ASK_LENGTH, START_LENGTH = 3, 2


class AskSchedule:
    """Counts the rounds without drafts: asks after 4, 8, 16 and then always 32 of them, and at once where a question brought tokens."""

    def __init__(self) -> None:
        self._quiet, self._wait = 0, FIRST_WAIT

    def is_due(self, cost: float, *, is_dear: bool) -> bool:
        """Whether to ask now, where that costs so many plain rounds; what `is_dear` waits until it is a small share of the rounds."""
        return self._quiet >= self._wait and (not is_dear or self._quiet * DEAR_SHARE >= cost)

    def begin_request(self) -> None:
        """Another text begins, of which the last one says little."""
        self._wait = min(self._wait, FIRST_WAIT)

    def count_plain(self) -> None:
        """Counts a round without a draft of the drafter."""
        self._quiet += 1

    def count_draft(self) -> None:
        """Counts a round that drafted because that pays."""
        self._quiet, self._wait = 0, FIRST_WAIT

    def count_question(self, accepted: int) -> None:
        """Counts a round that asked."""
        self._quiet, self._wait = 0, 0 if accepted else min(max(2 * self._wait, FIRST_WAIT), LONGEST_WAIT)


# Draft length by measured profit: draft and verify a token where its expected gain exceeds its cost on this machine.
#
# A round is a renewal: it emits 1 + (accepted drafts) tokens and costs its draft steps and one verify. At a reference rate r, a round is
# worth E[tokens] - r E[cost], and whatever adds to that pays (Ross, Applied Probability Models, renewal reward; Dinkelbach 1967). r is the
# rate of the newest rounds, but at least that of plain decoding. Before each draft step the policy computes, for each confidence bin that
# the next draft may fall into, the best of stopping there and of any further length. After the last step, the most valuable prefix is
# verified.
#
# Where several requests share their forwards, each counts its part of a plain verify, and what each row of its drafts adds to a round.

# Share of the sums over earlier rounds that is left after another round: a window of 50 rounds.
RATE_DECAY = 0.98
# Before the first round, the predicted rate of the best fixed length counts as this many plain rounds.
PREDICTED_ROUNDS = 5.0
# Share of the cost of all rounds that trials may lose: rounds of another length, whose costs no round has told yet.
TRIAL_SHARE = 0.02
# Of that budget, what a trial may take that would not pay even if its verify took half of what is assumed, or that only adds padding.
DOUBTFUL_SHARE = 0.1
# Rounds between two questions whether a trial is due: the answer needs all timings so far.
TRIAL_INTERVAL = 4
# While drafts are made to ask alone, older observations of first drafts count as at most this many.
STALE = 6.0
# Whether a first draft pays is asked at this many times the rate, so that the answer holds while the rate moves a little.
RATE_MARGIN = 1.1
# Costs and acceptance change slowly; they are recomputed where a request begins, and after so many rounds that drafted. Where no costs were
# measured, most is learned from the first ones: then they are recomputed after 1, 2, 4, 8 and always 16 of them.
REFRESH, LONGEST_REFRESH = 8, 16
# The longest draft of a pair without any figures, until a draft was right.
UNTRIED_LENGTH = 3
EVEN_CHANCE = 0.5


def expected_rate(costs: Costs, model: Acceptance, lengths: Sequence[int]) -> float:
    """Returns the tokens per unit of cost that rounds of the best of these draft lengths are expected to emit."""
    known = model.forecast(max(lengths))
    best = 0.0
    for length in lengths:
        tokens = 1.0 + float((1.0 + known.further[length - 1]) @ (known.first * known.accept_prob)) if length else 1.0
        cost = costs.draft(length) + min(costs.verify(rows) for rows in range(length + 1, max(lengths) + 2))
        best = max(best, tokens / cost)
    return best


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The figures behind the last round. Rates are tokens per unit of cost; `mode` is "plain", "shadow", "draft", "offer" (tokens that
    no drafter drafted), "trial" (a length whose cost is to be timed) or "ask" (a few drafts to learn whether they pay after all).

    Of the `drafted` tokens the first `verified` were sent to the target, plus `padding` dummy rows. `expected` is the expected number of
    emitted tokens when the draft ended; `cost` is the expected cost.
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
    """The policy's rule for the drafts of a round, as `interfaces.StopRule`."""

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
    """Implements `policies.DraftLengthPolicy` for the requests of one session; each request profits from the ones before.

    Where drafting does not seem to pay, it asks now and then: it drafts and verifies a few tokens all the same (`AskSchedule`). Where rows
    are dear it makes a shadow draft instead: one token is drafted, not verified, and compared with the token that plain decoding emits.
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
        """`longest` limits a draft, 0 without a drafter; `max_rows` limits what is verified, drafts and other tokens (None: `longest`).

        `stepwise`: the drafter calls `should_continue` after each draft; otherwise `plan` fixes the length. `bound` may change the costs
        before each round.
        """
        self._costs = costs
        self._bound = bound
        self._model = model
        self._longest = longest
        self._max_rows = max(longest, max_rows or 0)
        self._stepwise = stepwise
        # The cost that trials may lose, and the rows of this round's trial, 0 for none.
        self._trial_budget = 0.0
        self._trial_rows = 0
        self._length = 0
        self._mode = "plain"
        self._forecast = model.forecast(longest)
        self._until_refresh = 0
        self._is_new = True  # no round was observed yet
        self._has_news = True  # nor were forecast and costs computed, or rounds with drafts were observed since
        self._stale = True
        self._requests = self._priced = 1
        self._rows = [0] * (self._max_rows + 1)
        # Costs of verifying n drafts, and of drafting them.
        self._row_costs: Chances = np.zeros(self._max_rows + 1)
        self._draft_costs: Chances = np.zeros(longest + 1)
        # The same as numbers of Python, which a round reads one by one, and by length: expected tokens of a round, and its costs.
        self._row_list: list[float] = self._row_costs.tolist()
        self._draft_list: list[float] = self._draft_costs.tolist()
        self._length_tokens, self._length_costs = [1.0], [0.0]
        # The highest rate at which a first draft step is known to pay, the lowest at which it is known not to, and what they hold for.
        self._pays, self._pays_not, self._paying_at = 0.0, math.inf, (self._row_costs, True)
        self._any_untimed, self._until_trial = True, 0
        self._schedule = AskSchedule()
        self._is_untried, self._starts = costs.is_provisional and not model.is_measured, costs.is_provisional
        self._refresh, self._longest_refresh = (1, LONGEST_REFRESH) if costs.is_provisional else (REFRESH, REFRESH)
        self._tokens_reached = self._cost_reached = 0.0
        self._rate = self._plain_rate = 0.0
        self._offer: Sequence[float] = ()
        self._tables: tuple[Forecast | None, Chances, tuple[Chances, ...]] = (None, self._row_costs, ())
        # By position there are no bounds: only a model of confidences can be weighed by the drafter.
        self._rule: ShouldContinue = _StepRule(self) if len(model.bounds) else self.continues
        self._begin_round(any_prefix=True)

    def _begin_round(self, *, any_prefix: bool) -> None:
        self._any_prefix = any_prefix
        self._bins: list[int] = []
        self._confidences: list[float] = []
        self._chain = 1.0
        self._all_added = False  # tokens that no drafter drafted included
        # Expected tokens of verifying the first n drafts; worth and number of the best prefix.
        self._tokens = [1.0]
        self._worth = 1.0 - self._rate * self._row_list[0]
        self._verified = 0

    def plan(self, requests: int = 1, *, any_prefix: bool = True) -> RoundPlan:
        """Plans a draft where drafting pays; otherwise plain decoding, or now and then a draft that asks whether it pays.

        Offered tokens are verified instead where that is worth more: they cost no drafting.
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
        """Returns the mode of a round in which no draft seems to pay, and how much it drafts."""
        if not self._longest:
            return "plain", 0
        if self._starts:
            return "ask", min(START_LENGTH, self._longest)
        probe = self._draft_list[1] * self._plain_rate
        # With a bound on time, rounds with drafts and without are mixed on purpose, and a probe may be a waste of seconds or of joules.
        if self._bound is not None and not (self._bound.is_plain_fastest or self._bound.is_time_alone):
            is_due = self._schedule.is_due(max(probe, self._bound.probe_cost), is_dear=True)
            return ("shadow", 1) if is_due else ("plain", 0)
        if not self._schedule.is_due(probe, is_dear=probe > ASK_SHARE):
            return "plain", 0
        length = self._affordable(ASK_LENGTH, ASK_SHARE)
        return ("ask", length) if length else ("shadow", 1)

    def _affordable(self, longest: int, share: float) -> int:
        """Returns the most tokens that take at most this share of a plain round to draft and verify, up to `longest`."""
        drafts = self._draft_costs[1 : longest + 1]
        costs = drafts + self._row_costs[1 : len(drafts) + 1] - self._row_costs[0]
        return int((costs <= share * self._row_costs[0]).sum())

    def begin_request(self) -> None:
        """Another text begins: whether drafts pay is asked again soon. What rounds taught is computed now, when no token waits for it."""
        self._schedule.begin_request()
        if self._has_news:
            self._until_refresh = 0
            self._update_rate()
            self._length = self._first_length()

    def offer(self, chances: Sequence[float]) -> None:
        """Offers tokens to the next plan."""
        self._offer = chances

    def _trial(self) -> int:
        """Returns the rows of a round that is made to time them, 0 for none; takes what it loses from the budget."""
        if not self._any_untimed or self._until_trial > 0:
            self._until_trial -= 1
            return 0
        self._until_trial = TRIAL_INTERVAL
        untimed = self._costs.rows_to_time(self._max_rows + 1) if self._longest else []
        self._any_untimed = bool(untimed)  # for good: what was timed often enough stays so
        # At the rate that rounds reach, they are worth nothing on average, and a plain one less.
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
        """Returns how many offered tokens to verify, 0 where a draft or plain decoding is worth more; keeps them as the round's tokens."""
        at_most = self._worth + sum(accumulate(offer, operator.mul)) - self._rate * (self._row_list[1] - self._row_list[0])
        if self._length and at_most <= self._worth + max(self._worth_of_lengths()):
            return 0  # without a close look: a draft of a fixed length is worth more already
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
            return self._worth + self._gain_of_the_first(self._rate)
        return self._worth + self._worth_of_lengths()[self._length]

    def _extend(self, drafted: int, chances: Sequence[float]) -> int:
        """Returns how many of the tokens that could follow the drafts to verify with them."""
        if self._mode == "shadow":
            return 0
        self._add_unreported(drafted)
        self._all_added = True
        if self._verified < drafted:  # the drafts before them are too doubtful
            return 0
        for chance in chances[: self._max_rows - drafted]:
            self._add(chance, may_leave_out=True)
        return self._verified - drafted

    def _first_length(self) -> int:
        """Returns the most tokens to draft, 0 where not even one pays."""
        if not self._longest:
            return 0
        if self._stepwise:
            return self._longest if self._first_step_pays() else 0
        worth = self._worth_of_lengths()
        return worth.index(max(worth))  # the first one is 0

    def _first_step_pays(self) -> bool:
        """Whether a first draft adds to the worth of the round. The higher the rate, the less it adds: a bound serves for many rounds."""
        holds_for = self._row_costs, self._any_prefix
        if self._paying_at[0] is not holds_for[0] or self._paying_at[1] != holds_for[1]:
            self._pays, self._pays_not, self._paying_at = 0.0, math.inf, holds_for
        for rate in (self._rate * RATE_MARGIN, self._rate):
            if self._pays < self._rate < self._pays_not:
                if self._gain_of_the_first(rate) > 0:
                    self._pays = rate
                else:
                    self._pays_not = rate
        return self._rate <= self._pays

    def _update_rate(self) -> None:
        """Updates the reference rate and, every REFRESH rounds, the forecast and the costs."""
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
        if not self._is_new and self._requests == self._priced:
            # Sums of earlier rounds at what a plain round is known to cost now.
            self._cost_reached *= float(costs.min()) / self._row_list[0]
        self._priced = self._requests
        # The cheapest of n rows and all larger batches.
        self._row_costs = np.minimum.accumulate(costs[::-1])[::-1]
        self._row_list = self._row_costs.tolist()
        self._rows = [n + int(costs[n:].argmin()) for n in range(len(costs))]
        self._draft_list = [self._costs.draft(n, self._requests) for n in range(self._longest + 1)]
        self._draft_costs = np.array(self._draft_list)
        self._length_tokens = self._tokens_of_lengths().tolist()
        self._length_costs = (self._draft_costs + self._row_costs[: self._longest + 1]).tolist()
        self._plain_rate = 1 / self._row_list[0]
        if self._is_new:
            self._predict_rate()

    def _predict_rate(self) -> None:
        """Before the first round: takes the predicted rate of the best fixed length."""
        self._cost_reached = PREDICTED_ROUNDS * self._row_list[0]
        self._tokens_reached = max(map(operator.truediv, self._length_tokens, self._length_costs)) * self._cost_reached

    def _tokens_of_lengths(self) -> Chances:
        """Returns the expected tokens of rounds of 0 to `longest` drafts."""
        known = self._forecast
        return np.concatenate(([1.0], 1.0 + (1.0 + known.further[: self._longest]) @ (known.first * known.accept_prob)))

    def _worth_of_lengths(self) -> list[float]:
        """Returns how much more rounds of 0 to `longest` drafts are worth than a plain one."""
        rate, plain = self._rate, 1.0 - self._rate * self._length_costs[0]
        return [tokens - rate * cost - plain for tokens, cost in zip(self._length_tokens, self._length_costs, strict=True)]

    def _gain_of_the_first(self, rate: float) -> float:
        """Returns what a first draft adds to the worth of a round at this rate."""
        return self._gain_after([1.0], 1.0, 1.0 - rate * self._row_list[0], self._forecast.first, rate)

    def _gain_of_a_step(self) -> float:
        """Returns what another draft after the newest adds to the worth of the round."""
        return self._gain_after(self._tokens, self._chain, self._worth, self._forecast.transition[self._bins[-1]], self._rate)

    def _gain_after(self, tokens_so_far: Sequence[float], chain: float, reached: float, next_bin: Chances, rate: float) -> float:
        """Returns what another draft adds to the worth that a round has `reached` at this rate.

        `tokens_so_far` [drafts + 1] and `chain`: expected tokens of the first n drafts, and the probability that all of them are accepted;
        `next_bin` [bins]: the probability that the next draft is of each bin.
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
        # Where drafts are made to be timed, they are weighed as if they cost nothing: none ends the draft.
        return StopNumbers(self._tables[2], 0.0 if self._mode == "trial" else self._rate, self._any_prefix)

    def add_confidence(self, confidence: float) -> None:
        """Takes the drafter's probability of the token it just drafted."""
        self._add_draft(self._model.bin_of(confidence, len(self._bins)))
        self._confidences.append(confidence)

    def continues(self, confidence: float) -> bool:
        """As `add_confidence` does; returns whether drafting another pays."""
        self.add_confidence(confidence)
        if self._mode == "shadow" or len(self._bins) >= self._longest:
            return False
        if self._mode == "trial":
            return True
        if self._mode == "ask":  # on, as long as a draft after these is more likely compared than not
            return self._starts or self._chain > EVEN_CHANCE
        return self._gain_of_a_step() > 0

    def _add_draft(self, index: int) -> None:
        """Adds a draft of this bin to the round."""
        self._bins.append(index)
        self._add(float(self._forecast.accept_prob[index]), may_leave_out=self._any_prefix)

    def _add(self, chance: float, *, may_leave_out: bool) -> None:
        """Adds a token that is accepted with this probability after those before it, and updates the best prefix."""
        self._chain *= chance
        self._tokens.append(self._tokens[-1] + self._chain)
        count = len(self._tokens) - 1
        worth = self._tokens[-1] - self._rate * self._row_list[count]
        if worth > self._worth or not may_leave_out:
            self._worth, self._verified = worth, count

    def _to_verify(self, drafted: int) -> tuple[int, int]:
        """Returns how many drafts to verify, because those after them cost more than they are likely to bring, and the padding rows."""
        if not self._all_added:
            self._add_unreported(drafted)
        if self._mode in ("trial", "ask"):
            self._verified = drafted
        verified = min(self._verified, drafted)
        return verified, self._padding(verified)

    def _padding(self, verified: int) -> int:
        if self._mode == "trial":
            return max(0, self._trial_rows - 1 - verified)
        return self._rows[verified] - verified

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
        # The prediction says as much about the rate as the outcome, and varies less.
        tokens = (self._tokens[verified] + result.accepted + 1) / 2
        self._tokens_reached = RATE_DECAY * self._tokens_reached + tokens
        self._cost_reached = RATE_DECAY * self._cost_reached + self._spent()
        if self._bound is not None:
            promised = self._tokens[verified] if self._mode == "draft" else 0.0
            rows = verified + self._padding(verified)
            self._bound.spend(tokens, len(self._bins), rows, promised, shadow=self._mode == "shadow")
            self._stale = self._stale or not self._bound.is_time_alone

    def _observe_drafts(self, result: RoundResult) -> None:
        """Learns from the drafts of the drafter, and from the first one that was not verified where that can be told."""
        if self._mode in ("shadow", "ask"):
            self._until_refresh = 0  # the next plan computes everything anew
            # Where drafts are part of a mix, old ones say what it would be; but where none seem to pay, an unlucky start must not decide.
            if self._bound is None or self._bound.is_plain_fastest or self._bound.is_time_alone:
                self._model.fade(STALE)
        self._stale = self._has_news = True
        compared, right = min(result.verified, len(self._bins)), min(result.accepted, len(self._bins))
        if result.left_out_right is not None and compared < len(self._bins):
            compared, right = compared + 1, right + result.left_out_right
        self._model.observe(self._bins, compared, right)

    def _count_round(self, result: RoundResult) -> None:
        """Counts the round in the schedule of questions and in the budget of trials."""
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
        """The cost of the round according to the cost model. A shadow draft is no part of what plain rounds are worth."""
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
