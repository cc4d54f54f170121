"""Measures on an opened session what a plan predicts."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from edge_devices.machine.memory import peak_memory_bytes
from edge_runtime.calibration.cost_probe import measure_costs
from edge_runtime.session.session import Session

REPEATS = 3
PREFILL, TOKENS = 256, 64


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Medians: speeds in tokens per second, seconds of a draft step and of a verify of 1, 2, ... rows, mean tokens drafted per round.

    `memory_bytes` is the most the process took.
    """

    memory_bytes: int
    prefill: float
    plain: float
    drafted: float
    step_seconds: float
    verify_seconds: tuple[float, ...]
    draft_length: float


def measure_plan(session: Session, prompt: str) -> Measured:
    """Times a prefill, draft steps and verifies alone, then whole requests plainly and as configured in turn. Leaves no text in the cache."""
    target = session.target
    token = max(session.vocabulary.encode(prompt))
    count = min(PREFILL, target.context // 2)
    filled = []
    for _ in range(REPEATS + 1):  # the first warms up
        target.rollback(0)
        begin = time.perf_counter()
        target.prefill([token] * count)
        filled.append(time.perf_counter() - begin)
    target.rollback(0)
    costs = measure_costs(target, session.drafter, token, most_rows=session.settings.longest_draft + 1)
    sides: dict[int | None, list[float]] = {0: [], None: []}
    lengths = []
    for _ in range(REPEATS):
        for draft_length, speeds in sides.items():
            generation = session.generate(prompt, max_tokens=TOKENS, draft_length=draft_length)
            for _ in generation:
                pass
            speeds.append(generation.stats.tokens_per_second)
        lengths.append(generation.stats.drafted / max(1, generation.stats.rounds))
    target.rollback(0)
    return Measured(
        memory_bytes=peak_memory_bytes(),
        prefill=count / statistics.median(filled[1:]),
        plain=statistics.median(sides[0]),
        drafted=statistics.median(sides[None]),
        step_seconds=costs.mean_step,
        verify_seconds=costs.verify,
        draft_length=statistics.median(lengths),
    )
