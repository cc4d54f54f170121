"""The cost curve of llama.cpp's own kernels and of the project's, on one GGUF target, sides in turn.

    python scripts/benchmarks/bench_row_kernels.py /tmp/wide-bundle/target-q4_0.gguf --threads 2

Medians in milliseconds of verifies of 1 to 13 rows and of a prefill of 512, and times one row. Also says whether each row's logits equal
those of the same row alone.
"""

from __future__ import annotations

import time
from pathlib import Path

import click
import numpy as np

from edge_runtime.backends.kernels import ggml
from edge_runtime.backends.llama.context import LlamaOptions
from edge_runtime.backends.llama.library import library
from edge_runtime.backends.llama.target import LlamaTarget

PROMPT, PREFILL = 64, 512
ROWS = (1, 2, 3, 4, 6, 8, 10, 12, 13)


def open_target(path: Path, threads: int, kernels: bool) -> LlamaTarget:
    """Opens the target on one kind of kernels."""
    ggml.switch(kernels)
    return LlamaTarget(path, LlamaOptions(context=1024, threads=threads, draft=False))


def milliseconds(target: LlamaTarget, tokens: list[int], *, prefill: bool = False) -> float:
    """The time of one forward after the prompt."""
    target.rollback(PROMPT)
    start = time.perf_counter()
    (target.prefill if prefill else target.verify)(tokens)
    return (time.perf_counter() - start) * 1e3


def equal_rows(target: LlamaTarget, tokens: list[int]) -> int:
    """How many rows of a verify of `tokens` have the bits of the same row alone."""
    target.rollback(PROMPT)
    alone = [target.verify([token])[0].copy() for token in tokens]
    target.rollback(PROMPT)
    return sum(np.array_equal(one, row) for one, row in zip(alone, target.verify(tokens), strict=True))


@click.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--threads", default=2, show_default=True)
@click.option("--repeats", default=9, show_default=True)
def main(path: Path, threads: int, repeats: int) -> None:
    """Measures both kinds of kernels."""
    if library().row_kernels is None:
        raise click.ClickException(f"the row kernels do not run here: {library().stock_reason}")
    sides = {"stock": open_target(path, threads, kernels=False), str(library().row_kernels): open_target(path, threads, kernels=True)}
    tokens = np.random.default_rng(1).integers(50, next(iter(sides.values())).vocabulary.size, PROMPT + PREFILL).tolist()
    for target in sides.values():
        target.prefill(tokens[:PROMPT])
        milliseconds(target, tokens[PROMPT : PROMPT + ROWS[-1]])
    medians: dict[str, dict[int, float]] = {name: {} for name in sides}
    for rows in (*ROWS, PREFILL):
        found: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(repeats if rows < PREFILL else 3):
            for name, target in sides.items():
                found[name].append(milliseconds(target, tokens[PROMPT : PROMPT + rows], prefill=rows == PREFILL))
        for name, values in found.items():
            medians[name][rows] = float(np.median(values))
        print(
            f"{rows:4d} rows", *(f"{name}: {medians[name][rows]:8.2f} ms, {medians[name][rows] / medians[name][1]:5.2f}" for name in sides)
        )
    for name, target in sides.items():
        print(f"{name}: {equal_rows(target, tokens[PROMPT : PROMPT + ROWS[-1]])} of {ROWS[-1]} rows equal the same row alone")
        target.close()


if __name__ == "__main__":
    main()
