"""What scripts/checks/soak_server.py calls growth."""

from __future__ import annotations

import os
import sys

import pytest

pytest.importorskip("click")

from soak_server import Idle, below, problems, state_of


def idle(number: int, **grown: int) -> Idle:
    values = {"resident": 2_000_000, "anonymous": 1_000_000, "children": 4, "descriptors": 15, "threads": 12} | grown
    return Idle(seconds=number, requests=10 * number, **values)


def test_a_steady_server_has_no_problem() -> None:
    noisy = [idle(number, anonymous=1_000_000 + 20_000 * (number % 2), resident=2_000_000 * number) for number in range(1, 41)]
    assert problems(noisy) == []


def test_what_grows_in_the_warm_up_alone_is_no_problem() -> None:
    assert problems([idle(number, anonymous=min(number, 8) * 1_000_000, threads=min(number, 8)) for number in range(1, 41)]) == []


@pytest.mark.parametrize("name", ["children", "descriptors", "threads"])
def test_one_more_at_the_end_is_a_problem(name: str) -> None:
    samples = [idle(number) for number in range(1, 40)]
    last = idle(40, **{name: getattr(samples[0], name) + 1})
    assert problems([*samples, last]) == [f"{name}: {getattr(last, name)} at the end, at most {getattr(samples[0], name)} in the warm-up"]


def test_memory_that_grows_to_the_end_is_a_problem() -> None:
    (problem,) = problems([idle(number, anonymous=1_000_000 + 5_000 * number) for number in range(1, 41)])
    assert problem.startswith("the server's own memory grew from ")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_process_has_a_state() -> None:
    state = state_of(os.getpid(), 1.0, 0)
    assert state.anonymous <= state.resident
    assert min(state.threads, state.descriptors) >= 1
    assert len(below(os.getppid())) >= 1
