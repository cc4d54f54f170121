"""A simulated machine and drafter of known costs and acceptance, to hold policies against."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from edge_runtime.drafting.cost_model import CostCurve, MeasuredCosts, extrapolated
from edge_runtime.drafting.policies import DraftLengthPolicy, RoundResult, Timing

# Verify of 1 to 13 rows in milliseconds. The first eight were measured on real machines, the rest goes on in their manner.
REPACKED = (19.6, 32.6, 40.0, 32.0, 46.1, 53.3, 62.2, 56.5, 66.0, 74.0, 80.0, 70.0, 85.0)
NOT_REPACKED = (32.8, 24.8, 30.5, 35.3, 52.2, 56.4, 62.1, 61.8, 72.0, 80.0, 88.0, 90.0, 100.0)
LINEAR = tuple(20.0 + 4.0 * n for n in range(13))
STEEP = tuple(20.0 + 16.0 * n for n in range(13))
FLAT = tuple(20.0 + n for n in range(13))
SPREAD = 4.0
CURVES = {"repacked": REPACKED, "not repacked": NOT_REPACKED, "linear": LINEAR, "steep": STEEP, "flat": FLAT}


class ExactCosts:
    """The machine's true costs; implements `cost_model.Costs`."""

    is_provisional = False

    def __init__(self, verify: Sequence[float], step: float) -> None:
        self._verify, self._step = verify, step

    def verify(self, rows: int) -> float:
        known = list(self._verify)
        while len(known) < rows:
            known.append(extrapolated(known))
        return known[rows - 1]

    def share(self, rows: int, requests: int) -> float:
        return self.verify(rows * requests) / requests

    def draft(self, steps: int, requests: int = 1) -> float:
        return steps * self._step

    def learn(self, timing: Timing) -> None:
        """Exact costs have nothing to learn."""

    def rows_to_time(self, limit: int) -> Sequence[int]:
        """Nor are any to be timed."""
        return ()


class SettledCosts(CostCurve):
    """Costs that no timing changes, whatever the clock says."""

    def learn(self, timing: Timing) -> None:
        """Does nothing."""


def flat_costs() -> SettledCosts:
    """Rows cost nearly nothing."""
    return SettledCosts(MeasuredCosts(verify=tuple(10 + 0.1 * rows for rows in range(13)), step=0.2, overhead=0.3))


def rate(costs: ExactCosts, policy: DraftLengthPolicy, acceptance: Callable[[int], float], tokens: int, seed: int) -> float:
    """Tokens per unit of cost over `tokens` tokens; see `played`."""
    emitted, _, spent = played(costs, policy, acceptance, tokens, seed)
    return emitted / spent


def played(
    costs: ExactCosts,
    policy: DraftLengthPolicy,
    acceptance: Callable[[int], float],
    tokens: int,
    seed: int,
    *,
    same_text: bool = False,
) -> tuple[int, float, float]:
    """Plays rounds until there are `tokens` tokens; `acceptance(n)` is the mean chance of a draft after n tokens.

    Returns the tokens, how many the chances of what was verified say, which is their mean over all luck, and the cost. Each draft's own
    chance is drawn around the mean (beta of weight SPREAD), and the drafter's confidence is that chance, blurred. With `same_text` the
    draws belong to a token's place, so that policies with one seed meet the same luck: without it, 2000 tokens differ by 1 to 2 %.
    """
    chances = random.Random(seed)
    emitted, likely, spent = 0, 0.0, 0.0
    while emitted < tokens:
        mean, plan, drafted, accepted, standing = acceptance(emitted), policy.plan(), 0, 0, True
        stands = [1.0]
        while drafted < plan.draft_length:
            if same_text:
                chances.seed((seed << 32) + emitted + drafted)
            chance = chances.betavariate(max(mean * SPREAD, 1e-3), max((1 - mean) * SPREAD, 1e-3))
            drafted += 1
            stands.append(stands[-1] * chance)
            standing = standing and chances.random() < chance
            accepted += standing
            confidence = min(max(chance + chances.gauss(0, 0.05), 0.001), 0.999)
            if plan.should_continue is not None and not plan.should_continue(confidence):
                break
        drafting = costs.draft(drafted)
        verified, padding = plan.to_verify(0 if plan.shadow else drafted)
        left_out_right = accepted > verified if min(accepted, verified) == verified < drafted else None
        accepted = min(accepted, verified)
        rows = verified + 1 + padding
        likely += sum(stands[: verified + 1])
        spent += drafting + costs.verify(rows)
        timing = Timing(length=emitted, steps=drafted, draft_seconds=drafting, rows=rows, verify_seconds=costs.verify(rows))
        policy.observe(RoundResult(verified, accepted, left_out_right, timing))
        emitted += accepted + 1
    return emitted, likely, spent
