"""Concurrent clients: each sends its next request when its previous one ends."""

from __future__ import annotations

import time
from collections.abc import Sequence

from edge_bench.measure.prompts import Prompt
from edge_bench.measure.records import Concurrency
from edge_bench.measure.runners import session_for, start
from edge_bench.measure.variants import Variant
from edge_runtime.session.batch import Sessions
from edge_runtime.session.generation import Generation
from edge_runtime.session.session import Session


def alone(session: Session, prompts: Sequence[Prompt], tokens: int) -> list[list[int]]:
    """Returns each prompt's plain greedy output on a single session."""
    outputs = []
    for prompt in prompts:
        generation = session.generate(prompt.ids, max_tokens=tokens, draft_length=0)
        for _ in generation.rounds():
            pass
        outputs.append(generation.tokens)
    return outputs


def run_level(
    sessions: Sessions,
    variant: Variant,
    prompts: Sequence[Prompt],
    expected: Sequence[Sequence[int]],
    tokens: int,
    repeat: int,
) -> Concurrency:
    """Runs every prompt once for each client, in a different order per client; `expected` are the outputs to compare with."""
    clients = [session_for(session, variant) for session in sessions.sessions]
    outputs: dict[int, Sequence[int]] = {}
    generations: list[Generation] = []
    for number in range(len(prompts)):
        for index, session in enumerate(clients):
            which = (number + index) % len(prompts)
            generations.append(start(session, variant, prompts[which].ids, tokens))
            outputs[id(generations[-1])] = expected[which]
    begin = time.perf_counter()
    free = {id(session.target): begin for session in clients}  # when a client's session became free
    last: dict[int, float] = {}
    token_seconds: list[float] = []
    request_seconds = []
    for generation, emitted in sessions.run(generations):
        now, client = time.perf_counter(), id(generation.target)
        if id(generation) in last:  # the first token belongs to the request's latency, not between tokens
            token_seconds += [(now - last[id(generation)]) / len(emitted.tokens)] * len(emitted.tokens)
        last[id(generation)] = now
        if generation.finish_reason is not None:
            request_seconds.append(now - free[client])
            free[client] = now
    return Concurrency(
        clients=len(clients),
        variant=variant,
        repeat=repeat,
        requests=len(generations),
        tokens=sum(len(g.tokens) for g in generations),
        seconds=time.perf_counter() - begin,
        request_seconds=tuple(request_seconds),
        token_seconds=tuple(token_seconds),
        equal=sum(list(outputs[id(g)]) == g.tokens for g in generations),
        compared=len(generations),
    )
