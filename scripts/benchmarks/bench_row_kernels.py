"""The cost curve of a backend, on stock kernels and on the project's, sides in turn.

    python scripts/benchmarks/bench_row_kernels.py my-bundle --backend onnxruntime --threads 2

A process measures one backend: threads of llama.cpp spin behind each graph, and take the cores from onnxruntime.
Medians in milliseconds of verifies of 1 to 13 rows and of a prefill of 512, and times one row.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import click
import numpy as np

from edge_runtime.backends.kernels import ggml
from edge_runtime.backends.kernels.loader import VARIABLE, variant
from edge_runtime.backends.llama.context import LlamaOptions
from edge_runtime.backends.llama.loader import llama_library
from edge_runtime.backends.llama.target import LlamaTarget
from edge_runtime.backends.onnx.open import open_pair
from edge_runtime.backends.onnx.target import GraphTarget, OrtOptions, pair_of
from edge_runtime.bundle.bundle import Bundle, open_bundle

PREFILL, CONTEXT = 512, 1024
KERNELS = " with row kernels"
ROWS = tuple(range(1, 14))
BACKENDS = {"onnxruntime": "onnx", "llama.cpp": "gguf"}
AnyTarget = LlamaTarget | GraphTarget


def open_sides(bundle: Bundle, backend: str, threads: int, *, repack: bool) -> dict[str, AnyTarget]:
    """The target on the backend, first on stock kernels, which `repack` weights or not in llama.cpp."""
    sides: dict[str, AnyTarget] = {}
    asked = os.environ.get(VARIABLE, "")
    for kernels in (False, True):
        suffix = KERNELS if kernels else ""
        if backend == "onnxruntime":
            os.environ[VARIABLE] = asked if kernels else "none"
            sides[f"onnxruntime{suffix}"] = open_pair(pair_of(bundle, drafter=False), OrtOptions(context=CONTEXT, threads=threads))[0]
        else:
            options = LlamaOptions(context=CONTEXT, threads=threads, draft=False, use_extra_bufts=kernels or repack)
            llama_library()  # registers the kernels
            ggml.switch(kernels)
            sides[f"llama.cpp{suffix}"] = LlamaTarget(bundle.path("target", "gguf"), options)
    return sides


def switch_attention(side: str) -> None:
    """llama.cpp's attention, of all models in the process, goes with the side that runs."""
    ggml.switch(side.endswith(KERNELS))


def milliseconds(target: AnyTarget, tokens: list[int], depth: int, *, prefill: bool = False) -> float:
    """The time of one forward after the first `depth` tokens."""
    target.rollback(depth)
    start = time.perf_counter()
    (target.prefill if prefill else target.verify)(tokens)
    return (time.perf_counter() - start) * 1e3


@click.command(context_settings={"show_default": True})
@click.argument("folder", metavar="BUNDLE", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--backend", type=click.Choice(list(BACKENDS)), required=True, help="One a process: BUNDLE has its format.")
@click.option("--threads", default=2)
@click.option("--depth", default=64, help="Tokens before the verifies.")
@click.option("--repeats", default=9)
@click.option("--prefills", default=5, help="Prefills of 512 tokens.")
@click.option("--repack/--no-repack", default=True, help="Repacking of llama.cpp's own kernels dies where AMX is only advertised.")
def main(folder: Path, backend: str, threads: int, depth: int, repeats: int, prefills: int, repack: bool) -> None:
    """Measure BUNDLE's target; prints a Markdown table."""
    if variant() is None:
        raise click.ClickException("the row kernels do not run here; edge-run doctor says why")
    bundle = open_bundle(folder)
    if not bundle.has("target", BACKENDS[backend]):
        raise click.UsageError(f"{folder} has no target for {backend}; export it in that format")
    sides = open_sides(bundle, backend, threads, repack=repack)
    tokens = np.random.default_rng(1).integers(50, 4000, depth + PREFILL).tolist()
    for name, target in sides.items():
        switch_attention(name)
        target.prefill(tokens[:depth])
        milliseconds(target, tokens[depth : depth + ROWS[-1]], depth)
    times: dict[tuple[str, int], list[float]] = {}
    for number in range(repeats):
        for count in ROWS if number % 2 else reversed(ROWS):
            for name, target in sides.items():
                switch_attention(name)
                times.setdefault((name, count), []).append(milliseconds(target, tokens[depth : depth + count], depth))
    for _ in range(prefills):
        for name, target in sides.items():
            switch_attention(name)
            # Rows before the window are gone behind a prefill of this length.
            target.rollback(0)
            target.prefill(tokens[:depth])
            times.setdefault((name, PREFILL), []).append(milliseconds(target, tokens[depth:], depth, prefill=True))
    print("| rows |" + "".join(f" {name}, ms (times one row) |" for name in sides) + f"\n|--:{'|--:' * len(sides)}|")
    for count in (*ROWS, *([PREFILL] if prefills else [])):
        medians = {name: float(np.median(times[name, count])) for name in sides}
        print(f"| {count} |" + "".join(f" {medians[name]:.1f} ({medians[name] / np.median(times[name, 1]):.2f}) |" for name in sides))
    for target in sides.values():
        target.close()


if __name__ == "__main__":
    main()
