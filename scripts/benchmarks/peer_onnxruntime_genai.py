"""onnxruntime-genai as a worker of bench_peers.py, in an environment that has it: a folder that its model builder wrote, without drafts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnxruntime_genai as genai

from peer_protocol import Answer, timed, worker_options


@contextmanager
def engine() -> Iterator[tuple[dict[str, Any], Answer]]:
    """Opens the model that the arguments name."""
    options = worker_options("model").parse_args()
    config = genai.Config(str(options.model))
    config.overlay(f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {options.threads}}}}}}}}}')
    model = genai.Model(config)
    about = {"version": f"onnxruntime-genai {genai.__version__}", "flags": f"{options.model.name}, CPU, {options.threads} threads, greedy"}
    yield about, lambda request: answer(model, request, options.context)


def answer(model: genai.Model, request: dict[str, Any], context: int) -> dict[str, Any]:
    """Returns the figures of a request."""
    ids, count = request["prompt"]["ids"], request["tokens"]
    params = genai.GeneratorParams(model)
    params.set_search_options(do_sample=False, max_length=context, batch_size=1)  # a cache shorter than the window is refused
    generator = genai.Generator(model, params)
    emitted = 0

    def tokens() -> Iterator[None]:
        nonlocal emitted
        while emitted < count and not generator.is_done():
            generator.generate_next_token()
            emitted += 1
            yield None

    times = timed(lambda: generator.append_tokens(ids), tokens())
    return {**times, "prompt_tokens": len(ids), "tokens": emitted, "drafted": 0, "accepted": 0}
