"""Times the Python of a round: what a request takes outside of the engine's and the kernels' calls, with sources, monitor and statistics.

    python scripts/benchmarks/bench_round.py BUNDLE --backend onnx

Behind a forward, caches hold its weights: the same code takes three times as long as without one, so only real forwards count. Compare
two checkouts in turn (PYTHONPATH), some times each; the lower quartile says most on a busy machine.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from edge_bench.measure.prompts import DOMAINS, prepare, shipped_prompts
from edge_devices.command_line import one_sentence_errors
from edge_devices.machine.load import LoadWatch
from edge_runtime.backends.kernels.draft import NativeDraft
from edge_runtime.backends.onnx.loader import Call
from edge_runtime.backends.selection import BACKENDS
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session


class Outside:
    """The time since `begin`, without that of the `native` calls in it."""

    def __init__(self) -> None:
        self._begin = self._native = 0.0

    def native(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the call, whose time is not counted."""

        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self._native += time.perf_counter() - begin

        return timed

    def begin(self) -> None:
        self._native, self._begin = 0.0, time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._begin - self._native


def watch_calls(outside: Outside, backend: str | None) -> None:
    """Has the time of native calls not counted, of all that is opened from now on."""
    made, drafting = Call.__init__, NativeDraft.__init__

    def call(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        self._run = outside.native(self._run)

    def draft(self: Any, *arguments: Any, **options: Any) -> None:
        drafting(self, *arguments, **options)
        library = self._library
        self._library = SimpleNamespace(
            edge_draft_run=outside.native(library.edge_draft_run),
            edge_draft_scores=library.edge_draft_scores,
            edge_draft_free=library.edge_draft_free,
        )

    Call.__init__, NativeDraft.__init__ = call, draft  # type: ignore[assignment, method-assign]
    if backend == "llama":
        from edge_runtime.backends.llama.loader import llama_library

        api = llama_library().api
        for name in ("llama_decode", "llama_get_logits"):
            setattr(api, name, outside.native(getattr(api, name)))


def round_seconds(session: Session, outside: Outside, tokens: int, count: int) -> list[float]:
    """Returns the Python of each round of the shipped prompts, the first of which warms up."""
    rounds: list[float] = []
    for prompt in prepare(shipped_prompts(DOMAINS, count), session):
        generation = session.generate(prompt.ids, max_tokens=tokens)
        generation.prefill()
        before, own = 0, []
        outside.begin()
        for _ in generation:
            if (done := generation.stats.rounds) > before:
                own += [outside.seconds() / (done - before)] * (done - before)
                before = done
                outside.begin()
        rounds += own
    return rounds[len(rounds) // 5 :]


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--backend", type=click.Choice(BACKENDS))
@click.option("--tokens", default=64, help="Tokens of each request.")
@click.option("--most", "count", default=2, help="Prompts of each domain.")
@one_sentence_errors()
def main(bundle: Path, backend: str | None, tokens: int, count: int) -> None:
    """Print the Python of BUNDLE's rounds in microseconds, as JSON."""
    outside = Outside()
    watch_calls(outside, backend)
    with open_session(bundle, backend=backend) as session:
        watch = LoadWatch()
        rounds = round_seconds(session, outside, tokens, count)
        figures = dict(zip(("lower", "median", "upper"), (round(1e6 * part) for part in statistics.quantiles(rounds, n=4)), strict=True))
        click.echo(json.dumps({"backend": session.backend, "rounds": len(rounds), **figures, "load": watch.load().words()}))


if __name__ == "__main__":
    main()
