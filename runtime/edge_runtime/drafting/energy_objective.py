"""Drafts by joules: the power of each phase, the cost of a round in joules, and the fewest joules within a bound on time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_devices.files.limited_read import read_at_most
from edge_runtime.drafting.acceptance_model import Forecast
from edge_runtime.drafting.cost_model import Costs
from edge_runtime.drafting.policies import Timing
from edge_runtime.errors import ConfigError
from edge_runtime.interfaces import Drafter, Target

# What rounds take in seconds and joules where a second has a price: the trade that a bound on time is chosen from.
#
# A round is a walk over confidence bins. At a price λ of time the policy that stops it best is trade by backward induction over the number
# of drafts, the bin of the last one and the chance that all stand, at a reference rate r; then r becomes the tokens per cost of that
# policy (Dinkelbach 1967). All prices are computed at once. The last one is time alone: what the objective time takes, by the same model,
# so that what the model has wrong is wrong on both sides of a bound.

Array = NDArray[np.float64]

# Chances that all drafts stand are kept at so many points of a logarithmic grid, down to the least one.
POINTS, CHANCE_FLOOR = 32, 0.02
# Improvements of the reference rates by the first call, and by later ones, which begin with the rates before.
FIRST_STEPS, STEPS = 4, 1
# The most of the last drafts that may be left out of a verify.
KEPT = 2


class RoundCosts(NamedTuple):
    """Costs in seconds or joules: `verify[n]` of a forward that verifies n drafts, `draft[n]` of drafting n tokens."""

    verify: Array
    draft: Array


class Trade(NamedTuple):
    """By price: seconds and joules per token, and tokens per unit of cost."""

    seconds: Array
    joules: Array
    rates: Array


class Frontier:
    """Computes the trade at each of `prices` in watts, ascending, and for time alone, which comes last."""

    def __init__(self, prices: Array) -> None:
        # What a joule and a second count.
        self._weights = np.stack([np.append(np.ones(len(prices)), 0.0), np.append(prices, 1.0)])
        self._rates: Array | None = None

    def trade(self, known: Forecast, seconds: RoundCosts, joules: RoundCosts, *, stepwise: bool) -> Trade:
        """`stepwise`: a draft can end after each token; otherwise its length is fixed before."""
        draft = np.stack([joules.draft, seconds.draft])[:, None]
        forwards = np.stack([joules.verify, seconds.verify])
        verify = forwards[:, _cheapest_from(self._cost(forwards[:, None]))]
        longest = draft.shape[2] - 1
        tokens = np.concatenate(([1.0], 1.0 + (1.0 + known.further[:longest]) @ (known.first * known.accept_prob)))
        spent = draft + verify[:, :, : longest + 1]
        rates = tokens / self._cost(spent)
        best = rates.argmax(axis=1)
        if not stepwise or not longest:
            return self._trade(tokens[best], spent[:, np.arange(len(best)), best])
        steps = STEPS if self._rates is not None else FIRST_STEPS
        if self._rates is None:
            self._rates = rates.max(axis=1)
        walk = _Walk(known)
        for _ in range(steps):
            trade = self._trade(*walk.values(self._rates, self._weights, draft, verify))
            self._rates = trade.rates
        return trade

    def _cost(self, spent: Array) -> Array:
        """Cost [prices, n] of joules and seconds [2, prices or 1, n]."""
        cost: Array = self._weights[0][:, None] * spent[0] + self._weights[1][:, None] * spent[1]
        return cost

    def _trade(self, tokens: Array, spent: Array) -> Trade:
        cost = (self._weights * spent).sum(axis=0)
        return Trade(seconds=spent[1] / tokens, joules=spent[0] / tokens, rates=tokens / cost)


class _Walk:
    """The Markov chain of a round's drafts, on a grid of the chance that all of them stand."""

    def __init__(self, known: Forecast) -> None:
        self._known = known
        self._chances = np.geomspace(1.0, CHANCE_FLOOR, POINTS)
        # The chance after another draft [bins, points], and its place on the grid. What follows is nearly linear in the chance itself:
        # between points of its logarithm it would seem more than it is.
        after = np.maximum(known.accept_prob[:, None] * self._chances, CHANCE_FLOOR)
        self._below = np.minimum((np.log(after) / np.log(CHANCE_FLOOR) * (POINTS - 1)).astype(np.intp), POINTS - 2)
        upper, lower = self._chances[self._below], self._chances[self._below + 1]
        self._part = (upper - after) / (upper - lower)
        self._bins = np.arange(len(known.accept_prob))[:, None]

    def values(self, rates: Array, weights: Array, draft: Array, verify: Array) -> tuple[Array, Array]:
        """Tokens [prices], and joules and seconds [2, prices], of a round of the policy that is best at these rates."""
        longest, known = draft.shape[2] - 1, self._known
        priced = (weights * rates)[:, :, None, None]
        # Tokens that are lost where the last draft is not verified, and the one before it.
        lost: list[Array] = [np.zeros(1), self._chances, self._chances * (1 + 1 / known.accept_prob[:, None])]
        # Of what follows the drafts so far: tokens, joules and seconds [3, prices, bins, points].
        value = np.zeros((3, len(rates), len(self._bins), POINTS))
        value[1:] = verify[:, :, longest, None, None]
        for drafted in range(longest - 1, -1, -1):
            following = value[:, :, self._bins, self._below]
            following += self._part * (value[:, :, self._bins, self._below + 1] - following)
            following[0] += known.accept_prob[:, None] * self._chances
            step = (draft[:, :, drafted + 1] - draft[:, :, drafted])[..., None, None]
            if not drafted:
                break
            value = known.transition @ following
            value[1:] += step
            for fewer in range(min(KEPT, drafted) + 1):  # stop, and verify so many drafts fewer
                stopped = verify[:, :, drafted - fewer, None, None]
                stop = (priced * (value[1:] - stopped)).sum(axis=0) > value[0] + lost[fewer]
                value[0] = np.where(stop, -lost[fewer], value[0])
                value[1:] = np.where(stop, stopped, value[1:])
        drafted_once = following[..., 0] @ known.first
        tokens, spent, plain = 1.0 + drafted_once[0], drafted_once[1:] + step[..., 0, 0], verify[:, :, 0]
        stays = (weights * rates * (spent - plain)).sum(axis=0) > tokens - 1.0
        return np.where(stays, 1.0, tokens), np.where(stays, plain, spent)


def _cheapest_from(costs: Array) -> NDArray[np.intp]:
    """Returns for each number of drafts [prices, n] the number of rows, that or more, that costs least."""
    rows = np.empty(costs.shape, np.intp)
    rows[:, -1] = costs.shape[1] - 1
    for n in range(costs.shape[1] - 2, -1, -1):
        later = rows[:, n + 1]
        rows[:, n] = np.where(costs[:, n] <= np.take_along_axis(costs, later[:, None], axis=1)[:, 0], n, later)
    return rows


MAX_FILE_BYTES = 1 << 20
MAX_WATTS = 10_000.0


@dataclass(frozen=True, kw_only=True)
class PhasePower:
    """Mean watts, idle power included: while drafting, in a verify of several rows, and in a forward of one row (None: as a verify).

    `by_rows` has the watts of forwards of these numbers of rows, where they were measured: more rows keep more of a processor busy.
    All are from one meter and scope. Raises ConfigError for a value that cannot be a power.
    """

    draft: float
    verify: float
    plain: float | None = None
    by_rows: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = {f"step of {rows} tokens": watts for rows, watts in self.by_rows.items()}
        if not all(isinstance(number, int) and number >= 1 for number in self.by_rows):
            raise ConfigError(f"watts by tokens of a step are keyed {', '.join(map(str, self.by_rows))[:80]}; write numbers of 1 and more")
        for phase, watts in {"draft": self.draft, "verify": self.verify, "plain": self.plain, **rows}.items():
            is_number = isinstance(watts, int | float) and not isinstance(watts, bool)
            if watts is not None and not (is_number and math.isfinite(watts) and 0 < watts <= MAX_WATTS):
                raise ConfigError(f"{watts!r} W in the phase {phase} is no power; give a number above 0 and at most {MAX_WATTS:g}")

    def forward(self, rows: int) -> float:
        """Watts of a target forward of `rows` rows; linear between the numbers that were measured, and constant beyond them."""
        if self.by_rows:
            measured = sorted(self.by_rows)
            return float(np.interp(rows, measured, [self.by_rows[number] for number in measured]))
        return self.plain if rows == 1 and self.plain is not None else self.verify

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class PowerSource(Protocol):
    """A meter that measures the phases of an opened pair."""

    def phases(self, target: Target, drafter: Drafter | None, token: int, max_rows: int, key: str) -> PhasePower:
        """Returns the watts of each phase, measured or cached under `key`; empties the KV cache. `token` fills texts.

        Raises RequestError where the meter has no figure.
        """


def read_phase_power(path: Path) -> PhasePower:
    """Reads {"draft": W, "verify": W, "plain": W}, or what `edge-bench report LOG --json` writes of calibration loops. ConfigError.

    "by_rows": {"1": W, "4": W, ...} may give the watts of forwards by their numbers of rows.
    """
    try:
        data = json.loads(read_at_most(path, MAX_FILE_BYTES).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); write watts per phase, such as {_EXAMPLE}") from error
    if isinstance(data, dict) and data.get("estimate") is True:
        raise ConfigError(f"{path} is an estimate, nothing in it was measured; calibrate with a meter (docs/measure-energy.md)")
    watts = data.get("phase_watts", data) if isinstance(data, dict) else None
    if not isinstance(watts, dict) or not {"draft", "verify"} <= set(watts):
        raise ConfigError(f"{path} has no watts for draft and verify; write them such as {_EXAMPLE}")
    by_rows = watts.get("by_rows", {})
    try:
        counted = {int(rows): value for rows, value in by_rows.items()}
    except (AttributeError, ValueError) as error:
        raise ConfigError(f'by_rows of {path} is {str(by_rows)[:80]}; write watts by tokens of a step, such as {{"1": 4.4}}') from error
    return PhasePower(draft=watts["draft"], verify=watts["verify"], plain=watts.get("plain"), by_rows=counted)


class EnergyCosts:
    """Costs in joules: the seconds of other costs × the power of the phase. Implements `cost_model.Costs`."""

    def __init__(self, seconds: Costs, power: PhasePower, *, slowdown: float | None = None) -> None:
        """`slowdown`: the most time per token that fewer joules may cost, for `TimeBound`; None: any."""
        self.seconds, self._power, self.slowdown = seconds, power, slowdown
        # What a joule counts, and the price of time in watts; without the first, time alone counts.
        self.weights = 1.0, 0.0

    @property
    def is_provisional(self) -> bool:
        """Whether the seconds are."""
        return self.seconds.is_provisional

    def verify(self, rows: int) -> float:
        """Joules of one target forward of `rows` rows at the current length, with the price of its time."""
        return self.seconds.verify(rows) * self._priced(self._power.forward(rows))

    def share(self, rows: int, requests: int) -> float:
        """Joules of a request's part of a verify that `requests` requests share, with the price of its time."""
        return self.seconds.share(rows, requests) * self._priced(self._power.forward(rows * requests))

    def draft(self, steps: int, requests: int = 1) -> float:
        """Joules of drafting `steps` tokens, for one of `requests` requests that draft together, with the price of its time."""
        return self.seconds.draft(steps, requests) * self._priced(self._power.draft)

    def _priced(self, watts: float) -> float:
        return self.weights[0] * watts + self.weights[1]

    def table(self, rows: int, drafts: int, requests: int) -> tuple[RoundCosts, RoundCosts]:
        """Seconds and joules, without a price, of verifying up to `rows` - 1 drafts and of up to `drafts` drafts, a request's share."""
        verify = np.array([self.seconds.share(n, requests) for n in range(1, rows + 1)])
        draft = np.array([self.seconds.draft(n, requests) for n in range(drafts + 1)])
        watts = [self._power.forward(n * requests) for n in range(1, rows + 1)]
        return RoundCosts(verify, draft), RoundCosts(verify * watts, draft * self._power.draft)

    def rows_to_time(self, limit: int) -> Sequence[int]:
        """Returns the numbers of rows whose seconds too few rounds timed, the fewest first."""
        return self.seconds.rows_to_time(limit)

    def learn(self, timing: Timing) -> None:
        """Passes a timing to the costs in seconds: the time of a phase changes from round to round, its power hardly."""
        self.seconds.learn(timing)


_EXAMPLE = '{"draft": 3.1, "verify": 5.2, "plain": 4.4}'


# The fewest joules among what takes at most so much longer than the fastest drafts: a price of time that a balance of time moves.

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
        """Takes in what costs now, and computes the trade again, now and then; `rows` and `drafts` are the most of a round."""
        before = self._plain_seconds if self._frontier is not None else None
        self._seconds, self._joules = self._costs.table(rows, drafts, requests)
        if before is not None:  # earlier rounds at what a plain one is known to cost now
            self._sums[1:] *= self._plain_seconds / before
        self._until_renewal -= 1
        if self._until_renewal > 0 and requests == self._requests:
            return
        self._renewals += 1
        self._until_renewal = RENEWALS if self._renewals > EARLY else 1
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
            # As `Profit` predicts without a bound: by the best fixed length.
            fixed = self._frontier.trade(known, self._seconds, self._joules, stepwise=False)
            tokens = PREDICTED_ROUNDS * self._plain_seconds / float(fixed.seconds[-1])
            self._sums = tokens * np.array([1.0, fixed.joules[-1], fixed.seconds[-1]])
            self._spent, self._booked, self._unbooked = np.zeros(2), 0.0, 0.0

    def _aim(self, trade: Trade) -> None:
        """Sets the seconds per token to aim at, as a share of the fastest's, and the slope of the trade there."""
        bound = (1 + self._slowdown) * float(trade.seconds[-1])
        doubt = DOUBT / math.sqrt(1 + float(self._spent[0]) / DOUBT_TOKENS)
        lost = _mix(trade, (1 - doubt) * bound)[0] / _mix(trade, bound)[0] - 1
        self._allowed = (1 - doubt * min(1.0, DEAR * doubt / max(lost, 1e-9))) * (1 + self._slowdown)
        self._limit = self._allowed * float(trade.seconds[-1])
        _, self._slope = _mix(trade, self._limit)
        if self.is_plain_fastest and trade.joules.min() >= (1 - SAVING_FLOOR) * trade.joules[-1]:
            # Plain decoding is the cheapest too: what remains to choose is how often to ask whether drafts pay. The dearer unit tells.
            by_seconds, by_joules = self._draft_shares
            self._slope = 0.0 if by_joules > by_seconds else math.inf

    def _corrected(self) -> Trade:
        """The trade with what drafts were seen to take: the model's optimism is that of all drafts, while plain decoding is known."""
        expected, promised = BELIEVED + self._drafted
        drafts = np.abs(self._beyond_plain) > 1e-4 * self._seconds.verify[0]
        self._optimism = 1 + BELIEF * (min(max(expected / promised, CLIP[0]), CLIP[1]) - 1)
        scale = np.where(drafts, self._optimism, 1.0)
        seconds = self._trade.seconds * scale
        # The time of plain decoding is known, and it is what the fastest takes at most.
        plain = (1 + PROBE_SHARE) * self._plain_seconds
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
    def rate(self) -> float:
        """Tokens per unit of cost of the newest rounds, at the price that was set."""
        return float(self._sums[0]) / self._cost(float(self._sums[1]), float(self._sums[2]))

    @property
    def is_time_alone(self) -> bool:
        """Whether the next round's time alone counts. As long as it does, rounds are those of the objective time."""
        return math.isinf(self._price)

    @property
    def is_plain_fastest(self) -> bool:
        """Whether drafts are thought to cost time rather than save it."""
        return self._fastest >= (1 - 1e-4) * self._plain_seconds

    @property
    def _plain_seconds(self) -> float:
        """Of plain decoding, which may pad."""
        return float(self._seconds.verify.min())

    @property
    def probe_cost(self) -> float:
        """Of drafting one token, in forwards of one row: by seconds or joules, whichever is more."""
        return max(self._draft_shares)

    @property
    def _draft_shares(self) -> tuple[float, float]:
        """What drafting one token takes of a forward of one row, in seconds and in joules."""
        return float(self._seconds.draft[1] / self._seconds.verify[0]), float(self._joules.draft[1] / self._joules.verify[0])

    def spend(self, tokens: float, drafted: int, row: int, promised: float, *, shadow: bool) -> None:
        """Takes in a round: the tokens it brought, its drafts, its rows beside the first, and what drafts promised, 0 of other rounds.

        A `shadow` draft is no part of what plain rounds are worth, but it is spent.
        """
        seconds = float(self._seconds.draft[drafted] + self._seconds.verify[row])
        joules = float(self._joules.draft[drafted] + self._joules.verify[row])
        worth = (float(self._joules.verify[row]), float(self._seconds.verify[row])) if shadow else (joules, seconds)
        self._sums = DECAY * self._sums + (tokens, *worth)
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
