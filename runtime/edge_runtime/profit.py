"""Draft length by measured profit: a token is drafted where what it is likely to bring exceeds what it costs on this machine.

A round is a renewal: it emits 1 + (accepted drafts) tokens and costs its draft steps and one verify. The rate to beat is that of the
best fixed length, r = max E[tokens] / E[cost] with 0 (plain decoding) among the lengths; a further draft pays while it raises
E[tokens] - r E[cost], the value of a round at that rate (Ross, Applied Probability Models, renewal reward; Dinkelbach 1967).

Where N requests share their forwards each weighs an Nth of a verify of N times its rows, as if the others did as it does.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.acceptance_model import AcceptanceModel
from edge_runtime.bundle import MAX_DRAFT_LENGTH
from edge_runtime.cost_curve import Costs
from edge_runtime.policies import Timing

# How much faster than plain decoding drafting must look to begin with it, and to go on with it: estimates are noisy.
ENTER, STAY = 1.01, 0.99
# What finding the way back to drafting may cost, in plain rounds: per emitted token, and saved up at most.
CREDIT_PER_TOKEN, MOST_CREDIT = 0.01, 2.0
# While nothing is drafted, what was seen before counts as at most this many observations of the first position, and of the others.
STALE, STALE_LATER = 6.0, 1.0


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Why the last round drafted as it did. Rates are tokens per unit of cost, `mode` is "plain", "listen" or "draft".

    `expected` are the tokens the round was expected to emit when its draft ended, `cost` what it was expected to cost.
    """

    mode: str
    planned: int
    drafted: int
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

    def __init__(self, costs: Costs, model: AcceptanceModel, *, longest: int = MAX_DRAFT_LENGTH, stepwise: bool = True) -> None:
        """`longest` bounds a draft. `stepwise`: the drafter asks `go_on` after each draft; otherwise the length is decided before."""
        self._costs = costs
        self._model = model
        self._longest = longest
        self._stepwise = stepwise
        self._credit = 0.0
        self._mode, self._planned = "draft", 0
        self._rate = self._plain_rate = 0.0
        self._positions = model.positions()
        self._rows = [0] * (longest + 2)
        self._row_costs = [0.0] * (longest + 2)
        self._stale = True
        self._requests = 1
        self._chain = self._expected = 1.0
        self._confidences: list[float] = []
        self._drafted = 0

    def timed(self, timing: Timing) -> None:
        """Passes a round's timings to the costs."""
        self._costs.learn(timing)

    @property
    def listening(self) -> bool:
        """Whether the drafts of this round are only compared with what plain decoding brings."""
        return self._mode == "listen"

    def draft_length(self, requests: int = 1) -> int:
        """Returns the most tokens to draft now; `go_on` may end the draft earlier."""
        self._stale = self._stale or requests != self._requests
        self._requests = requests
        self._chain = self._expected = 1.0
        self._confidences = []
        if self._stale:
            self._plan()
        if self._mode == "draft":
            return self._longest if self._stepwise else self._planned
        self._mode = "listen" if self._longest and self._credit * self._verify(1) >= self._step() else "plain"
        return 1 if self.listening else 0

    def _plan(self) -> None:
        """Finds the best length known before anything is drafted, and whether it beats plain decoding."""
        self._stale = False
        self._positions = self._model.positions()
        self._weigh_rows()
        plain = self._plain_rate = 1 / self._verify(1)
        step, chain, tokens, best = self._step(), 1.0, 1.0, 0.0
        self._planned = 0
        for length in range(1, self._longest + 1):
            chain *= self._positions[length - 1]
            tokens += chain
            rate = tokens / (length * step + self._row_costs[length + 1])
            if rate > best:
                self._planned, best = length, rate
        self._rate = max(best, plain)
        if best >= (STAY if self._mode == "draft" else ENTER) * plain:
            self._mode = "draft"
        else:
            self._mode, self._planned = "plain", 0

    def _weigh_rows(self) -> None:
        """For each number of rows: which larger one is the cheapest to verify, and what it costs."""
        cheapest, cost = 0, float("inf")
        for rows in range(self._longest + 1, 0, -1):
            own = self._verify(rows)
            if own <= cost:
                cheapest, cost = rows, own
            self._rows[rows], self._row_costs[rows] = cheapest, cost

    def go_on(self, confidence: float) -> bool:
        """Hears how sure the drafter is of the token it just drafted; returns whether another pays."""
        self._confidences.append(confidence)
        self._chain *= self._model.drafted(confidence)
        self._expected += self._chain
        return not self.listening and self._gain_of_more(len(self._confidences)) > 0

    def padding(self, drafted: int) -> int:
        """Returns how many rows to verify beyond the drafts only because the larger batch is the cheaper one."""
        return self._rows[drafted + 1] - drafted - 1

    def observe(self, drafted: int, accepted: int) -> None:
        """Learns from a round whose drafts were verified, or that had none."""
        self._drafted, self._expected = drafted, self._expected if self._confidences and drafted else self._tokens_of(drafted)
        if drafted:
            self._stale = True
            self._model.observe(drafted, accepted, self._confidences[:drafted])
        else:
            self._model.fade(STALE, STALE_LATER)
            self._credit = min(self._credit + CREDIT_PER_TOKEN, MOST_CREDIT)

    def hear(self, right: bool) -> None:
        """Learns from a round that listened: whether the draft was the token that plain decoding brought. Comes before `observe`."""
        self._stale = True
        self._model.observe(1, int(right), self._confidences)
        self._credit -= self._step() / self._verify(1)

    @property
    def last(self) -> Decision:
        """What was decided in the last round, for those who want to know why."""
        drafted = self._drafted
        return Decision(
            mode=self._mode if drafted or self.listening else "plain", planned=self._planned, drafted=drafted,
            padding=self.padding(drafted), expected=self._expected, cost=drafted * self._step() + self._row_costs[drafted + 1],
            plain_rate=self._plain_rate, best_rate=self._rate, confidences=tuple(self._confidences),
        )  # fmt: skip

    def _verify(self, rows: int) -> float:
        """This request's share of a verify in which all that share it bring so many rows: their own numbers are not known yet."""
        return self._costs.verify(rows * self._requests) / self._requests

    def _step(self) -> float:
        return self._costs.step(self._requests)

    def _gain_of_more(self, drafted: int) -> float:
        """The most that drafting on adds to the value of this round."""
        chain, tokens, best, here, step = self._chain, 0.0, -1.0, self._row_costs[drafted + 1], self._step()
        for length in range(drafted + 1, self._longest + 1):
            chain *= self._positions[length - 1]
            tokens += chain
            best = max(best, tokens - self._rate * ((length - drafted) * step + self._row_costs[length + 1] - here))
        return best

    def _tokens_of(self, length: int) -> float:
        """Expected tokens of a round that drafts `length`, before anything is drafted."""
        chain = tokens = 1.0
        for index in range(length):
            chain *= self._positions[index]
            tokens += chain
        return tokens
