"""Requests about images of several sizes: the time of the encode phase and of the prefill, and their workloads for an energy meter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from edge_bench.measure.records import ImageCost
from edge_devices.energy.phases import ENCODE, PREFILL
from edge_devices.energy.protocol import Work, Workload
from edge_runtime.errors import RequestError
from edge_runtime.media.image import check_budget
from edge_runtime.session.self_checks import QUESTION, square, time_image
from edge_runtime.session.session import Session


def check_sizes(session: Session, budgets: Sequence[int]) -> None:
    """Raises RequestError for a budget that images do not have, or that the session does not take."""
    for budget in budgets:
        check_budget(budget)
        rows = session.media_rows(square(budget, 0))
        if rows + len(QUESTION) >= session.target.context:
            raise RequestError(f"an image of {rows} rows does not fit the context of {session.target.context}; raise --context")


def measure_image(session: Session, budget: int, repeat: int) -> ImageCost:
    """Runs one request with an image that was not encoded before, up to its first token."""
    stats = time_image(session, square(budget, repeat))
    prefill = stats.prefill_seconds - stats.encode_seconds
    return ImageCost(budget=budget, repeat=repeat, rows=stats.media_rows, encode_seconds=stats.encode_seconds, prefill_seconds=prefill)


def image_workloads(session: Session, budgets: Sequence[int]) -> dict[str, Workload]:
    """Returns a workload of such requests for each budget: the phases are encode, prefill, and the forward of the first token."""
    seeds = itertools.count(1)
    return {f"image {budget}": _requests(session, budget, seeds) for budget in budgets}


def _requests(session: Session, budget: int, seeds: Iterator[int]) -> Workload:
    def work() -> Work:
        stats = time_image(session, square(budget, next(seeds)))
        prefill = stats.prefill_seconds - stats.encode_seconds
        phases = {ENCODE: stats.encode_seconds, PREFILL: prefill, "plain": stats.decode_seconds}
        return Work(emitted_tokens=stats.tokens, prompt_tokens=stats.prompt_tokens, phases=phases)

    return work
