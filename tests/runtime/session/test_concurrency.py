"""Cancelling one of several sessions never disturbs another: whatever joins, leaves, fails or overflows, and whenever.

test_interleaving.py has the same on both backends.

The loop and the lockstep are Python on one thread; what runs beside it is the server's worker, which hands over through queues and locks
of the standard library. There is no C of ours, so there is nothing of ours for a thread sanitiser to look at.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.session.generation import Generation
from scripted import VOCABULARY, plain_greedy, scripted_sessions

COUNT = 3
ACTS = st.lists(
    st.tuples(
        st.integers(0, COUNT - 1),
        st.sampled_from(("start", "join", "cancel", "step", "step", "step")),
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30),
        st.integers(1, 25),
        st.integers(0, 6),
    ),
    min_size=5,
    max_size=40,
)


def has_begun(running: Sequence[Generation]) -> list[Generation]:
    """Those whose prompt is in the cache; before, the rows may still be those of the request before."""
    return [item for item in running if item.tokens]


@settings(max_examples=80, deadline=None)
@given(acts=ACTS)
def test_every_output_is_a_prefix_of_its_own_text_alone(acts) -> None:
    """Requests start, join, are cancelled and end in any order; each says what it would say alone, and its cache holds only its own."""
    _, sessions = scripted_sessions(COUNT, context=64)
    running: dict[int, Generation] = {}
    observed: list[tuple[Generation, list[int], int]] = []
    for number, act, prompt, maximum, draft_length in acts:
        session, step = sessions.sessions[number], sessions.decoder
        busy = any(item.target is session.target for item in step.running)
        if act in ("start", "join") and not busy:
            generation = session.generate(prompt, max_tokens=maximum, draft_length=draft_length)
            (step.add if act == "start" else step.join)(generation)
            running[number] = generation
            observed.append((generation, prompt, maximum))
        elif act == "cancel" and number in running:
            step.remove(running.pop(number))
        else:
            step.step()
        for item in has_begun(step.running):
            text = [*item.prompt, *item.tokens]
            assert item.target.tokens.tolist() == text[: item.target.length], "rows of another's tokens"
    while sessions.decoder.running:
        sessions.decoder.step()
    for generation, prompt, maximum in observed:
        alone = plain_greedy(prompt, maximum)
        assert generation.tokens == alone[: len(generation.tokens)]
        if generation.finish_reason == "length":
            assert generation.tokens == alone
