"""Draft lengths by energy: the power of each phase, the cost of a round in joules, and the fewest joules within a bound on time."""

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

# The trade between seconds and joules: what rounds take of both if a second has a price in joules, for several prices.
#
# A round is a walk over confidence bins. For a price of time and a reference rate r, backward induction finds the policy that stops the
# walk best; its state is the number of drafts, the bin of the last one, and the probability that all are accepted. Then r becomes the
# tokens per cost of that policy, and so on (Dinkelbach 1967). All prices are computed at once. The last "price" counts time alone: it is
# the fastest policy by the same model, so that errors of the model affect both sides of a bound on time alike.

Array = NDArray[np.float64]

# The probability that all drafts are accepted has this many grid points on a logarithmic scale, from 1 to CHANCE_FLOOR.
POINTS, CHANCE_FLOOR = 32, 0.02
# Iterations for the reference rates: in the first call, and in later ones, which start from the previous rates.
FIRST_STEPS, STEPS = 4, 1
# The model lets at most this many of the last drafts be left out of a verify.
KEPT = 2


class RoundCosts(NamedTuple):
    """Costs in seconds or joules: `verify[n]` for a forward that verifies n drafts, `draft[n]` for drafting n tokens."""

    verify: Array
    draft: Array


class Trade(NamedTuple):
    """For each price of time: seconds and joules per token, and tokens per unit of cost."""

    seconds: Array
    joules: Array
    rates: Array


class Frontier:
    """Computes the trade at ascending `prices` of time, in watts (joules per second), and for time alone, which comes last."""

    def __init__(self, prices: Array) -> None:
        # By price, the weights of a joule and of a second in the cost.
        self._weights = np.stack([np.append(np.ones(len(prices)), 0.0), np.append(prices, 1.0)])
        self._rates: Array | None = None

    def trade(self, known: Forecast, seconds: RoundCosts, joules: RoundCosts, *, stepwise: bool) -> Trade:
        """Returns the trade. `stepwise`: a draft can end after each token; otherwise its length is fixed in advance."""
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
        """Returns the cost [prices, n] of `spent`: joules and seconds [2, prices or 1, n]."""
        cost: Array = self._weights[0][:, None] * spent[0] + self._weights[1][:, None] * spent[1]
        return cost

    def _trade(self, tokens: Array, spent: Array) -> Trade:
        cost = (self._weights * spent).sum(axis=0)
        return Trade(seconds=spent[1] / tokens, joules=spent[0] / tokens, rates=tokens / cost)


class _Walk:
    """The Markov chain of a round's drafts, on a grid of the probability that all of them are accepted."""

    def __init__(self, known: Forecast) -> None:
        self._known = known
        self._chances = np.geomspace(1.0, CHANCE_FLOOR, POINTS)
        # The probability after another draft [bins, points], and its position on the grid: between point `_below` and the next one,
        # weighted by `_part`. The interpolation is linear in the probability itself, as values are; in its logarithm it would overestimate
        # them.
        after = np.maximum(known.accept_prob[:, None] * self._chances, CHANCE_FLOOR)
        self._below = np.minimum((np.log(after) / np.log(CHANCE_FLOOR) * (POINTS - 1)).astype(np.intp), POINTS - 2)
        upper, lower = self._chances[self._below], self._chances[self._below + 1]
        self._part = (upper - after) / (upper - lower)
        self._bins = np.arange(len(known.accept_prob))[:, None]

    def values(self, rates: Array, weights: Array, draft: Array, verify: Array) -> tuple[Array, Array]:
        """Returns the tokens [prices], and joules and seconds [2, prices], of a round under the best policy at these rates."""
        longest, known = draft.shape[2] - 1, self._known
        priced = (weights * rates)[:, :, None, None]
        # The expected tokens that are lost if the last 0, 1 or 2 drafts are not verified.
        lost: list[Array] = [np.zeros(1), self._chances, self._chances * (1 + 1 / known.accept_prob[:, None])]
        # Expected tokens, joules and seconds after the drafts so far [3, prices, bins, points].
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
            for fewer in range(min(KEPT, drafted) + 1):  # stops here if that is better, and leaves the last `fewer` drafts unverified
                stopped = verify[:, :, drafted - fewer, None, None]
                stop = (priced * (value[1:] - stopped)).sum(axis=0) > value[0] + lost[fewer]
                value[0] = np.where(stop, -lost[fewer], value[0])
                value[1:] = np.where(stop, stopped, value[1:])
        drafted_once = following[..., 0] @ known.first
        tokens, spent, plain = 1.0 + drafted_once[0], drafted_once[1:] + step[..., 0, 0], verify[:, :, 0]
        stays = (weights * rates * (spent - plain)).sum(axis=0) > tokens - 1.0
        return np.where(stays, 1.0, tokens), np.where(stays, plain, spent)


def _cheapest_from(costs: Array) -> NDArray[np.intp]:
    """Returns for each number of drafts [prices, n] the cheapest number, at least that, to verify with padding."""
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
    """Mean watts, including idle power: while drafting, in a verify of several rows, and in a forward of one row (None: as a verify).

    `by_rows` has measured watts of forwards by their number of rows, since more rows keep more of a processor busy. All figures come from
    the same meter and scope. Raises ConfigError for a value that cannot be a power.
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
        """Watts of a target forward of `rows` rows; interpolated between the measured numbers of rows, constant beyond them."""
        if self.by_rows:
            measured = sorted(self.by_rows)
            return float(np.interp(rows, measured, [self.by_rows[number] for number in measured]))
        return self.plain if rows == 1 and self.plain is not None else self.verify

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class PowerSource(Protocol):
    """A meter that measures the phases of an opened pair."""

    def phases(self, target: Target, drafter: Drafter | None, token: int, max_rows: int, key: str) -> PhasePower:
        """Returns the watts of each phase, measured or cached under `key`. Empties the KV cache. Test texts consist of `token`.

        Raises RequestError if the meter gives no figure.
        """


def read_phase_power(path: Path) -> PhasePower:
    """Reads {"draft": W, "verify": W, "plain": W}, or the output of `edge-bench report LOG --json` for calibration loops.

    "by_rows": {"1": W, "4": W, ...} may add the watts of forwards by number of rows. Raises ConfigError if the file cannot be used.
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
    """Costs in joules: the costs in `seconds` times the power of the phase. Implements `cost_model.Costs`."""

    def __init__(self, seconds: Costs, power: PhasePower, *, slowdown: float | None = None) -> None:
        """`slowdown`: how much longer a token may take to save joules, as a share of the fastest, for `TimeBound`; None: any."""
        self.seconds, self._power, self.slowdown = seconds, power, slowdown
        # The weight of a joule, and the price of time in watts. If the weight is 0, time alone counts.
        self.weights = 1.0, 0.0

    @property
    def is_provisional(self) -> bool:
        """Whether the costs in seconds are provisional."""
        return self.seconds.is_provisional

    def verify(self, rows: int) -> float:
        """Joules of one target forward of `rows` rows at the current length, plus the price of its time."""
        return self.seconds.verify(rows) * self._priced(self._power.forward(rows))

    def share(self, rows: int, requests: int) -> float:
        """Joules of a request's `rows` rows in a verify that `requests` requests share, plus the price of their time."""
        return self.seconds.share(rows, requests) * self._priced(self._power.forward(rows * requests))

    def draft(self, steps: int, requests: int = 1) -> float:
        """Joules of drafting `steps` tokens, for one of `requests` requests that draft together, plus the price of the time."""
        return self.seconds.draft(steps, requests) * self._priced(self._power.draft)

    def _priced(self, watts: float) -> float:
        return self.weights[0] * watts + self.weights[1]

    def table(self, rows: int, drafts: int, requests: int) -> tuple[RoundCosts, RoundCosts]:
        """Returns a request's seconds and joules, without the price of time, for up to `rows` - 1 verified drafts and `drafts` drafts."""
        verify = np.array([self.seconds.share(n, requests) for n in range(1, rows + 1)])
        draft = np.array([self.seconds.draft(n, requests) for n in range(drafts + 1)])
        watts = [self._power.forward(n * requests) for n in range(1, rows + 1)]
        return RoundCosts(verify, draft), RoundCosts(verify * watts, draft * self._power.draft)

    def rows_to_time(self, limit: int) -> Sequence[int]:
        """Returns the numbers of rows that have too few timings, those with the fewest first."""
        return self.seconds.rows_to_time(limit)

    def learn(self, timing: Timing) -> None:
        """Passes a timing to the costs in seconds. The time of a phase changes from round to round; its power hardly does."""
        self.seconds.learn(timing)


_EXAMPLE = '{"draft": 3.1, "verify": 5.2, "plain": 4.4}'


# The bound on time: the fewest joules per token, while a token takes at most a given share longer than with the fastest drafts. Joules are
# minimized at a price of time, and a balance of saved time moves that price.

# Prices of time that the trade is computed for, as multiples of the watts of a forward. Above the last one, time alone counts.
PRICES = np.concatenate(([0.0], np.geomspace(0.05, 20.0, 11)))
# The trade is computed again after every RENEWALS forecasts, but after each of the first EARLY ones, which teach most.
RENEWALS, EARLY = 4, 8
# A saving below this share of the fastest policy's joules is no reason to take longer, as the model's errors are as large.
SAVING_FLOOR = 0.01
# A balance of this many plain rounds changes the price by a factor of e; and the largest balance that counts.
BALANCE, BALANCE_LIMIT = 6.0, 6.0
# A new price that differs by less than this share is ignored.
SAME_PRICE = 0.05
# The fastest time is a forecast, so at first this share of the bound is withheld. Its square halves after DOUBT_TOKENS tokens. If
# withholding 1 % of the time costs more than DEAR % of the joules, less is withheld.
DOUBT, DOUBT_TOKENS, DEAR = 0.1, 100.0, 0.4
# The weight of a new trade in a moving average, because forecasts vary.
SMOOTH = 0.25
# Correction of the trade by what drafts really bring, as a ratio to what it expects of them: the range of the ratio; the tokens by which it
# is pulled to 1; and the part of it that is believed, since some of it comes from changes of the price, which the fastest policy never
# makes.
CLIP, BELIEVED, BELIEF = (0.9, 1.2), 10.0, 0.5
# If plain decoding is fastest, `Profit` spends this share of a plain round per token on shadow drafts.
PROBE_SHARE = 0.01
# After each round the sums are multiplied by this: those that give the reference rate, and those of the balance of time.
DECAY, BUDGET_DECAY = 0.98, 0.9995
# The prediction before the first round counts as this many plain rounds.
PREDICTED_ROUNDS = 5.0


class TimeBound:
    """Chooses the price of time before each round.

    The optimum within the bound is a mix of two policies: the ends of the edge of the trade's convex hull that the bound crosses. At a
    price equal to the slope of that edge, both are worth the same. The balance is the time by which all rounds so far are below the bound.
    The larger it is, the lower is the price of the next round; so rounds of both policies alternate in the right proportion.

    The balance needs the time that the fastest policy would have taken for the same tokens. It is computed with the first forecast that has
    learned from their rounds, so that both times are about the same text.
    """

    def __init__(self, costs: EnergyCosts, slowdown: float) -> None:
        """`slowdown`: how much longer a token may take to save joules, as a share of the fastest drafts' time."""
        self._costs, self._slowdown = costs, slowdown
        self._frontier: Frontier | None = None
        self._trade: Trade
        self._beyond_plain: NDArray[np.float64]
        self._until_renewal = self._renewals = self._requests = 0
        self._fastest = 0.0  # seconds per token, by the newest forecast
        self._price = -1.0
        # Decaying sums over rounds. `_sums`, with DECAY: tokens, joules, seconds. With BUDGET_DECAY: `_spent`, tokens and seconds; and
        # `_drafted`, for rounds with drafts the tokens that the trade expects at their cost, and the tokens that their confidences
        # promised.
        self._sums, self._spent, self._drafted = np.zeros(3), np.zeros(2), np.zeros(2)
        # The seconds that the fastest policy would have taken for the tokens so far, and the tokens that are not in it yet.
        self._booked = self._unbooked = 0.0

    def renew(self, known: Forecast, *, rows: int, drafts: int, requests: int, stepwise: bool) -> None:
        """Reads the current costs and, now and then, computes the trade again. `rows` and `drafts` are the most of a round."""
        before = self._plain_seconds if self._frontier is not None else None
        self._seconds, self._joules = self._costs.table(rows, drafts, requests)
        if before is not None:  # scales the costs of earlier rounds to what a plain one is known to cost now
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
        # Averaged as differences from the plain seconds at the time of each trade, because these drift.
        beyond_plain = trade.seconds - self._seconds.verify[0]
        self._beyond_plain = beyond_plain if share == 1 else self._beyond_plain + share * (beyond_plain - self._beyond_plain)
        self._aim(self._corrected())
        if requests != self._requests:  # earlier rounds, with another number of requests, cannot be compared
            self._requests = requests
            # Starts from the best fixed length, as `Profit` does without a bound.
            fixed = self._frontier.trade(known, self._seconds, self._joules, stepwise=False)
            tokens = PREDICTED_ROUNDS * self._plain_seconds / float(fixed.seconds[-1])
            self._sums = tokens * np.array([1.0, fixed.joules[-1], fixed.seconds[-1]])
            self._spent, self._booked, self._unbooked = np.zeros(2), 0.0, 0.0

    def _aim(self, trade: Trade) -> None:
        """Sets the time per token to aim at (`_limit` in seconds, `_allowed` relative to the fastest) and the slope of the trade there."""
        bound = (1 + self._slowdown) * float(trade.seconds[-1])
        doubt = DOUBT / math.sqrt(1 + float(self._spent[0]) / DOUBT_TOKENS)
        lost = _mix(trade, (1 - doubt) * bound)[0] / _mix(trade, bound)[0] - 1
        self._allowed = (1 - doubt * min(1.0, DEAR * doubt / max(lost, 1e-9))) * (1 + self._slowdown)
        self._limit = self._allowed * float(trade.seconds[-1])
        _, self._slope = _mix(trade, self._limit)
        if self.is_plain_fastest and trade.joules.min() >= (1 - SAVING_FLOOR) * trade.joules[-1]:
            # Plain decoding also takes the fewest joules, so only the frequency of probes is left to choose. The unit in which a probe is
            # more expensive decides it.
            by_seconds, by_joules = self._draft_shares
            self._slope = 0.0 if by_joules > by_seconds else math.inf

    def _corrected(self) -> Trade:
        """Returns the trade, corrected by what drafts were seen to take. Plain decoding is known, so only policies with drafts change."""
        expected, promised = BELIEVED + self._drafted
        drafts = np.abs(self._beyond_plain) > 1e-4 * self._seconds.verify[0]
        self._optimism = 1 + BELIEF * (min(max(expected / promised, CLIP[0]), CLIP[1]) - 1)
        scale = np.where(drafts, self._optimism, 1.0)
        seconds = self._trade.seconds * scale
        # The time of plain decoding is known, and the fastest policy cannot be slower.
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
        if price > max(float(PRICES[-1]) * self._watts, 2 * self._slope):  # the slope may be above the last price
            price = math.inf
        if price == self._price or abs(price - self._price) <= SAME_PRICE * min(price, self._price):
            return False
        self._price = price
        self._costs.weights = (1.0, price) if math.isfinite(price) else (0.0, self._watts)
        return True

    @property
    def rate(self) -> float:
        """Tokens per unit of cost of the newest rounds, at the current price."""
        return float(self._sums[0]) / self._cost(float(self._sums[1]), float(self._sums[2]))

    @property
    def is_time_alone(self) -> bool:
        """Whether time alone counts in the next round. Then rounds are the same as with the objective "time"."""
        return math.isinf(self._price)

    @property
    def is_plain_fastest(self) -> bool:
        """Whether drafts are thought to cost time rather than save it."""
        return self._fastest >= (1 - 1e-4) * self._plain_seconds

    @property
    def _plain_seconds(self) -> float:
        """The seconds of plain decoding, which may pad its one row if a larger batch is cheaper."""
        return float(self._seconds.verify.min())

    @property
    def probe_cost(self) -> float:
        """The cost of drafting one token, relative to a forward of one row, in seconds or joules, whichever is more."""
        return max(self._draft_shares)

    @property
    def _draft_shares(self) -> tuple[float, float]:
        """The cost of drafting one token, relative to a forward of one row, in seconds and in joules."""
        return float(self._seconds.draft[1] / self._seconds.verify[0]), float(self._joules.draft[1] / self._joules.verify[0])

    def spend(self, tokens: float, drafted: int, row: int, promised: float, *, shadow: bool) -> None:
        """Counts a round: its emitted tokens, the number of drafted ones, and its rows other than the first one.

        `promised` is the expected number of tokens of a round that drafts, 0 for other rounds. A `shadow` draft counts in the balance of
        time, but not in the rate, where it would make plain rounds seem worse.
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
    """Returns the fewest joules per token of a mix of policies that takes at most `limit` seconds, and the price in watts that leads to it.

    At that price both policies of the mix cost the same. It is 0 if the policy with the fewest joules is fast enough. It is infinite, for
    time alone, if the mix saves hardly any joules, or if no policy is fast enough.
    """
    seconds, joules = trade.seconds, trade.joules
    fast, slow = np.flatnonzero(seconds <= limit), np.flatnonzero(seconds > limit)
    if not len(fast):  # the part of the bound that is withheld may be more than the slowdown
        return float(joules[-1]), math.inf
    best, slope = float(joules[fast].min()), 0.0
    if len(slow):
        slopes = (joules[fast, None] - joules[slow]) / (seconds[slow] - seconds[fast, None])
        mixed = joules[fast, None] - slopes * (limit - seconds[fast, None])
        if float(mixed.min()) < best:
            best, slope = float(mixed.min()), float(slopes.flat[mixed.argmin()])
    return best, slope if best < (1 - SAVING_FLOOR) * float(joules[-1]) else math.inf
