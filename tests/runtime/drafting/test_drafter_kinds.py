"""Which drafter is the faster: measured in turn, bounded in time, leaving no trace."""

from __future__ import annotations

import pytest

from edge_runtime.drafting.drafter_kinds import MAX_ROUNDS, MIN_ROUNDS, STEPS, draft_step_seconds
from scripted import ScriptedDrafter, ScriptedTarget, next_token


class Timed(ScriptedDrafter):
    """A drafter whose draft takes the next of `seconds` on a clock of its own; the last one again and again."""

    def __init__(self, target: ScriptedTarget, clock: list[float], *seconds: float) -> None:
        super().__init__(target, lambda context, _: next_token(context))
        self.clock = clock
        self.seconds = list(seconds)

    def draft(self, last: int, draft_length: int) -> list[int]:
        assert self._target.length == 1, "there is a text of one token to draft after"
        self.clock[0] += self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]
        return super().draft(last, draft_length)


def measured(*, dense: tuple[float, ...], split: tuple[float, ...]):
    clock, target = [0.0], ScriptedTarget()
    drafters = {"dense": Timed(target, clock, *dense), "split": Timed(target, clock, *split)}
    seconds = draft_step_seconds(target, drafters, 2, clock=lambda: clock[0])
    assert target.length == 0
    return seconds, drafters, clock[0]


def test_medians_per_step_without_the_first_draft():
    seconds, drafters, _ = measured(dense=(9.0, 0.003, 0.001, 0.002, 0.002), split=(0.001,))
    assert seconds["dense"] == pytest.approx(0.002 / STEPS)
    assert seconds["split"] == pytest.approx(0.001 / STEPS)
    assert len(drafters["dense"].lengths) == len(drafters["split"].lengths)
    assert set(drafters["dense"].lengths) == {STEPS}


def test_quick_drafters_are_measured_often_and_slow_ones_a_few_times():
    _, quick, _ = measured(dense=(0.0001,), split=(0.0001,))
    assert len(quick["dense"].lengths) == MAX_ROUNDS + 1
    _, slow, taken = measured(dense=(1.0,), split=(1.0,))
    assert len(slow["dense"].lengths) == MIN_ROUNDS + 1
    assert taken == 2 * (MIN_ROUNDS + 1)
    _, middle, taken = measured(dense=(0.02,), split=(0.01,))
    assert MIN_ROUNDS + 1 < len(middle["dense"].lengths) < MAX_ROUNDS
    assert taken < 0.37
