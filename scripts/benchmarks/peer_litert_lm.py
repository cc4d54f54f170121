"""LiteRT-LM as a worker of bench_peers.py, in an environment that has litert-lm-api: one .litertlm file, with and without its drafter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import litert_lm
from litert_lm import interfaces

from peer_protocol import Answer, timed, worker_options

# Gemma's first token, which this engine does not add to a text.
BOS = "<bos>"
GREEDY = interfaces.SamplerConfig(top_k=1, top_p=1.0, temperature=1.0, seed=0)


@contextmanager
def engine() -> Iterator[tuple[dict[str, Any], Answer]]:
    """Opens the model that the arguments name."""
    options = worker_options("model").parse_args()
    # The file has a context of its own. Drafts are switched for each session; a file without a drafter refuses them then.
    with litert_lm.Engine(str(options.model), backend=interfaces.CPU(thread_count=options.threads), enable_benchmark=True) as opened:
        about = {
            "version": f"LiteRT-LM {version('litert-lm-api')}",
            "flags": f"{options.model.parent.name}, CPU, {options.threads} threads, greedy",
        }
        yield about, lambda request: answer(opened, request)


def answer(engine: litert_lm.Engine, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of a request. Its own counts are used: it tokenizes the text itself, and groups tokens into chunks of text."""
    drafts, text = request["variant"]["policy"] != "plain", BOS + request["prompt"]["text"]
    session = engine.create_session(
        apply_prompt_template=False, sampler_config=GREEDY, max_output_tokens=request["tokens"], enable_speculative_decoding=drafts
    )
    try:
        times = timed(lambda: session.run_prefill([text]), iter(session.run_decode_async()))
        counted = session.get_benchmark_info()
        return {
            **times,
            "prompt_tokens": counted.last_prefill_token_count,
            "tokens": counted.last_decode_token_count,
            "drafted": 0,  # it counts them in its log alone
            "accepted": 0,
        }
    finally:
        session.close()
