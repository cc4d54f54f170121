"""Requests about images of several sizes: the time of the encode phase and of the prefill, and their workloads for an energy meter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from edge_devices.energy.phases import ENCODE, PREFILL
from edge_devices.energy.protocol import Work, Workload
from edge_runtime.bench.measure.records import ImageCost
from edge_runtime.errors import RequestError
from edge_runtime.media.image import SIDE, Image, check_budget
from edge_runtime.session.generation import Generation
from edge_runtime.session.session import Session

_PROMPT = "What is this?"


def check_sizes(session: Session, budgets: Sequence[int]) -> None:
    """Raises RequestError for a budget that images do not have, or that the session does not take."""
    for budget in budgets:
        check_budget(budget)
        rows = session.rows_taken(square(budget, 0))
        if rows + len(_PROMPT) >= session.target.context:
            raise RequestError(f"an image of {rows} rows does not fit the context of {session.target.context}; raise --context")


def square(budget: int, seed: int) -> Image:
    """Returns a square image of noise within the budget; each seed is another image, whose rows are not kept from earlier."""
    side = SIDE * math.isqrt(budget)
    return Image(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def measure_image(session: Session, budget: int, repeat: int) -> ImageCost:
    """Runs one request with an image that was not encoded before, up to its first token."""
    stats = _answered(session, square(budget, repeat)).stats
    return ImageCost(
        budget=budget,
        repeat=repeat,
        rows=stats.media_rows,
        encode_seconds=stats.encode_seconds,
        prefill_seconds=stats.prefill_seconds - stats.encode_seconds,
    )


def image_workloads(session: Session, budgets: Sequence[int]) -> dict[str, Workload]:
    """Returns a workload of such requests for each budget: the phases are encode, prefill, and the forward of the first token."""
    seeds = itertools.count(1)
    return {f"image {budget}": _requests(session, budget, seeds) for budget in budgets}


def _requests(session: Session, budget: int, seeds: Iterator[int]) -> Workload:
    def work() -> Work:
        stats = _answered(session, square(budget, next(seeds))).stats
        phases = {ENCODE: stats.encode_seconds, PREFILL: stats.prefill_seconds - stats.encode_seconds, "plain": stats.decode_seconds}
        return Work(emitted_tokens=stats.tokens, prompt_tokens=stats.prompt_tokens, phases=phases)

    return work


def _answered(session: Session, image: Image) -> Generation:
    generation = session.generate(session.media_prompt(_PROMPT, [image]), max_tokens=1, draft_length=0)
    for _ in generation.rounds():
        pass
    return generation
