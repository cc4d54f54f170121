"""What rounds take in seconds and joules where a second has a price: the trade that a bound on time is chosen from.

A round is a walk over confidence bins. At a price λ of time the policy that stops it best is trade by backward induction over the number of
drafts, the bin of the last one and the chance that all stand, at a reference rate r; then r becomes the tokens per cost of that policy
(Dinkelbach 1967). All prices are computed at once. The last one is time alone: what the objective time takes, by the same model, so that
what the model has wrong is wrong on both sides of a bound.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_runtime.drafting.acceptance_model import Forecast

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
