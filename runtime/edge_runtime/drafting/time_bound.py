"""The fewest joules among what takes at most so much longer than the fastest drafts: a price of time that a balance of time moves."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from edge_runtime.drafting.acceptance_model import Forecast
from edge_runtime.drafting.frontier import Frontier, Trade
from edge_runtime.drafting.phase_power import EnergyCosts

# Prices of time that the trade is computed for, as multiples of the watts of a forward; a higher one than the last is time alone.
PRICES = np.concatenate(([0.0], np.geomspace(0.05, 20.0, 11)))
# The trade is computed again after so many forecasts, and after each of the first ones, from which most is learned.
RENEWALS, EARLY = 4, 8
# Fewer joules by less than this share of those of the fastest are no reason to take longer: the model's errors are as large.
SAVING_FLOOR = 0.01
# Plain rounds of balance that change the price by a factor e, and the most that count.
BALANCE, BALANCE_LIMIT = 6.0, 6.0
# A price that differs less is kept.
SAME_PRICE = 0.05
# Part of the bound that is withheld at first, because the fastest is a forecast, and the tokens after which half of its square is left.
# Where withholding a percent costs more than this many percent of joules, so much less is withheld.
DOUBT, DOUBT_TOKENS, DEAR = 0.1, 100.0, 0.4
# Weight of a new trade beside those before: forecasts vary.
SMOOTH = 0.25
# What drafts bring less or more than the trade expects of them is taken for true of the fastest as far as this, after so many tokens, and
# by this part: some of it comes from changes of the price, which the fastest does not make.
CLIP, BELIEVED, BELIEF = (0.9, 1.2), 10.0, 0.5
# Share of a plain round that `Profit` spends on shadow drafts for each token where plain decoding is the fastest.
PROBE_SHARE = 0.01
# Share that is left after another round: of the sums that a round's worth comes from, and of those that the bound is kept by.
DECAY, BUDGET_DECAY = 0.98, 0.9995
# Plain rounds that the prediction counts as before the first.
PREDICTED_ROUNDS = 5.0


class TimeBound:
    """Chooses the price of time before each round.

    At the slope of the edge of the trade's convex hull that the bound crosses, both ends of the edge are worth the same, and a mix of them
    takes the fewest joules that any mix within the bound does. The balance is the time by which the rounds so far are below the bound; the
    more there is, the lower is the next round's price, so the rounds mix themselves. What the fastest would have taken for the tokens so
    far is booked by the first forecast that learned from their rounds, so that both met the same text.
    """

    def __init__(self, costs: EnergyCosts, slowdown: float) -> None:
        """`slowdown`: the most time per token that fewer joules may cost, as a share of what the fastest drafts take."""
        self._costs, self._slowdown = costs, slowdown
        self._frontier: Frontier | None = None
        self._trade: Trade
        self._beyond_plain: NDArray[np.float64]
        self._until_renewal = self._renewals = self._requests = 0
        self._fastest = 0.0  # seconds per token, by the newest forecast
        self._price = -1.0
        # Of the newest rounds: tokens, joules and seconds. Of more: tokens and seconds; of those that drafted, the tokens that the trade
        # expects for their cost, and those that their confidences promised.
        self._sums, self._spent, self._drafted = np.zeros(3), np.zeros(2), np.zeros(2)
        # Seconds that forecasts of the fastest gave for the tokens so far, and the tokens that wait for one.
        self._booked = self._unbooked = 0.0

    def renew(self, known: Forecast, *, rows: int, drafts: int, requests: int, stepwise: bool) -> None:
        """Computes the trade again, now and then; `rows` and `drafts` are the most of a round."""
        self._until_renewal -= 1
        if self._until_renewal > 0 and requests == self._requests:
            return
        self._renewals += 1
        self._until_renewal = RENEWALS if self._renewals > EARLY else 1
        self._seconds, self._joules = self._costs.table(rows, drafts, requests)
        self._watts = float(self._joules.verify[0] / self._seconds.verify[0])
        if self._frontier is None:
            self._frontier = Frontier(PRICES * self._watts)
        trade: Trade = self._frontier.trade(known, self._seconds, self._joules, stepwise=stepwise)
        self._fastest = float(trade.seconds[-1])
        if self._renewals > EARLY:
            self._booked, self._unbooked = self._booked + self._unbooked * self._fastest, 0.0
        share = max(SMOOTH, 1 / self._renewals) if requests == self._requests else 1.0
        self._trade = trade if share == 1 else Trade(*(old + share * (new - old) for old, new in zip(self._trade, trade, strict=True)))
        # By the costs of each trade's own time: as they drift, averaged seconds of plain decoding are no longer those of a forward.
        beyond_plain = trade.seconds - self._seconds.verify[0]
        self._beyond_plain = beyond_plain if share == 1 else self._beyond_plain + share * (beyond_plain - self._beyond_plain)
        self._aim(self._corrected())
        if requests != self._requests:  # what the rounds before took was another work
            self._requests = requests
            tokens = PREDICTED_ROUNDS * float(self._seconds.verify[0]) / float(self._trade.seconds[-1])
            self._sums = tokens * np.array([1.0, self._trade.joules[-1], self._trade.seconds[-1]])
            self._spent, self._booked, self._unbooked = np.zeros(2), 0.0, 0.0

    def _aim(self, trade: Trade) -> None:
        """Sets the seconds per token to aim at, as a share of the fastest's, and the slope of the trade there."""
        bound = (1 + self._slowdown) * float(trade.seconds[-1])
        doubt = DOUBT / math.sqrt(1 + float(self._spent[0]) / DOUBT_TOKENS)
        lost = _mix(trade, (1 - doubt) * bound)[0] / _mix(trade, bound)[0] - 1
        self._allowed = (1 - doubt * min(1.0, DEAR * doubt / max(lost, 1e-9))) * (1 + self._slowdown)
        self._limit = self._allowed * float(trade.seconds[-1])
        _, self._slope = _mix(trade, self._limit)

    def _corrected(self) -> Trade:
        """The trade with what drafts were seen to take: the model's optimism is that of all drafts, while plain decoding is known."""
        expected, promised = BELIEVED + self._drafted
        drafts = np.abs(self._beyond_plain) > 1e-4 * self._seconds.verify[0]
        self._optimism = 1 + BELIEF * (min(max(expected / promised, CLIP[0]), CLIP[1]) - 1)
        scale = np.where(drafts, self._optimism, 1.0)
        seconds = self._trade.seconds * scale
        # The time of plain decoding is known, and it is what the fastest takes at most.
        plain = (1 + PROBE_SHARE) * float(self._seconds.verify.min())
        seconds[-1] = plain if self.is_plain_fastest else min(seconds[-1], max(plain, float(self._trade.seconds[-1])))
        return Trade(seconds, self._trade.joules * scale, self._trade.rates)

    def choose(self) -> bool:
        """Sets the price of the next round; returns whether it changed."""
        fastest = self._optimism * (self._booked + self._unbooked * float(self._trade.seconds[-1]))
        if self.is_plain_fastest:
            fastest = float(self._spent[0] * self._limit) / self._allowed
        balance = self._allowed * fastest - float(self._spent[1])
        rounds = min(balance / float(self._seconds.verify[0]), BALANCE_LIMIT)
        price = self._slope * math.exp(min(-rounds / BALANCE, 50.0))
        if rounds < 0:
            price = max(price, float(PRICES[1]) * self._watts * math.exp(min(-rounds / BALANCE, 50.0)))
        if price > max(float(PRICES[-1]) * self._watts, 2 * self._slope):  # a slope may be steeper than any price
            price = math.inf
        if price == self._price or abs(price - self._price) <= SAME_PRICE * min(price, self._price):
            return False
        self._price = price
        self._costs.weights = (1.0, price) if math.isfinite(price) else (0.0, self._watts)
        return True

    @property
    def limit(self) -> float:
        """Seconds per token that are aimed at."""
        return self._limit

    @property
    def rate(self) -> float:
        """Tokens per unit of cost of the newest rounds, at the price that was set."""
        return float(self._sums[0]) / self._cost(float(self._sums[1]), float(self._sums[2]))

    @property
    def is_plain_fastest(self) -> bool:
        """Whether drafts are thought to cost time rather than save it."""
        return self._fastest >= (1 - 1e-4) * float(self._seconds.verify.min())

    @property
    def probe_cost(self) -> float:
        """Of drafting one token, in forwards of one row: by seconds or joules, whichever is more."""
        return max(float(costs.draft[1] / costs.verify[0]) for costs in (self._seconds, self._joules))

    def spend(self, tokens: float, drafted: int, row: int, promised: float) -> None:
        """Takes in a round: the tokens it brought, its drafts, its rows beside the first, and what drafts promised, 0 of other rounds."""
        seconds = float(self._seconds.draft[drafted] + self._seconds.verify[row])
        joules = float(self._joules.draft[drafted] + self._joules.verify[row])
        self._sums = DECAY * self._sums + (tokens, joules, seconds)
        self._spent = BUDGET_DECAY * self._spent + (tokens, seconds)
        self._booked, self._unbooked = BUDGET_DECAY * self._booked, BUDGET_DECAY * self._unbooked + tokens
        self._drafted *= BUDGET_DECAY
        if promised:
            weights = self._costs.weights
            rate = float((1 / (weights[0] * self._trade.joules + weights[1] * self._trade.seconds)).max())
            self._drafted += (rate * self._cost(joules, seconds), promised)

    def _cost(self, joules: float, seconds: float) -> float:
        return self._costs.weights[0] * joules + self._costs.weights[1] * seconds


def _mix(trade: Trade, limit: float) -> tuple[float, float]:
    """Returns the joules per token of the mix that takes the fewest in at most `limit` seconds, and the price in watts that makes it one.

    At that price both of its ends cost the same. It is 0 where the least joules are fast enough, and infinite where time alone takes hardly
    more joules, or too many seconds.
    """
    seconds, joules = trade.seconds, trade.joules
    fast, slow = np.flatnonzero(seconds <= limit), np.flatnonzero(seconds > limit)
    if not len(fast):  # less than is withheld may be spent
        return float(joules[-1]), math.inf
    best, slope = float(joules[fast].min()), 0.0
    if len(slow):
        slopes = (joules[fast, None] - joules[slow]) / (seconds[slow] - seconds[fast, None])
        mixed = joules[fast, None] - slopes * (limit - seconds[fast, None])
        if float(mixed.min()) < best:
            best, slope = float(mixed.min()), float(slopes.flat[mixed.argmin()])
    return best, slope if best < (1 - SAVING_FLOOR) * float(joules[-1]) else math.inf
