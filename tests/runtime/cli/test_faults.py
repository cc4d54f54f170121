"""Backends that lie, clocks that jump, memory that runs out: one sentence, the right exit code, and the session goes on where it can."""

from __future__ import annotations

import datetime
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.errors import OUT_OF_MEMORY, BundleError, EdgeRuntimeError
from edge_runtime.session.session import Session
from scripted import ScriptedDrafter, ScriptedTarget, make_session, next_token, plain_greedy


class Broken(ScriptedTarget):
    """One whose logits are not all numbers from its 20th row on, while `breaks`."""

    breaks = True

    def verify(self, tokens):
        logits = super().verify(tokens)
        if self.breaks and self.length > 20:
            logits[0, 5] = np.nan
        return logits


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=1), SamplingParams(temperature=0.0, repetition_penalty=1.3)],
)
@pytest.mark.parametrize("acceptance", ["block", "coupled"])
def test_logits_with_nan_end_the_request_with_their_cause(params: SamplingParams, acceptance: str) -> None:
    target = Broken()
    session = make_session(target=target, drafter=ScriptedDrafter(target, lambda context, _: next_token(context)))
    with pytest.raises(EdgeRuntimeError, match=r"NaN|logit is nan"):
        session.generate([1, 2], max_tokens=60, draft_length=3, sampling=params, acceptance=acceptance).text()
    target.breaks = False
    generation = session.generate([1, 2], max_tokens=10, draft_length=3)
    generation.text()
    assert generation.tokens == plain_greedy([1, 2], 10), "the session takes further requests"


@settings(max_examples=50, deadline=None)
@given(jumps=st.lists(st.integers(-(10**9), 10**9), min_size=1, max_size=5))
def test_a_clock_that_jumps_changes_no_token_and_no_duration(jumps: list[int]) -> None:
    """The wall clock is only written down; what is measured and waited for goes by the monotonic one."""
    calls = iter(range(10**6))

    class Jumping(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime.fromtimestamp(2 * 10**9 + jumps[next(calls) % len(jumps)], tz)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: float(jumps[next(calls) % len(jumps)]))
        patch.setattr(datetime, "datetime", Jumping)
        session = make_session()
        generation = session.generate([1, 2], max_tokens=20, draft_length=3)
        generation.text()
        record = session.record(generation)
    assert generation.tokens == plain_greedy([1, 2], 20)
    assert 0 <= record["stats"]["decode_seconds"] < 10


@pytest.mark.parametrize(
    ("error", "code", "output"),
    [
        (MemoryError(), 1, f"Error: {OUT_OF_MEMORY}\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
        (
            BundleError("nowhere is not a bundle; make one with edge-export"),
            1,
            "Error: nowhere is not a bundle; make one with edge-export\n",
        ),
    ],
)
def test_what_the_command_says(command, error: BaseException, code: int, output: str) -> None:
    def failing(_: object) -> Session:
        raise error

    command.opens(failing)
    result = command("generate", "bundle", "prompt")
    assert (result.exit_code, result.stderr, result.stdout) == (code, output, "")
