"""Times a draft step of llama.cpp's own drafter, of the kernels' with the dense and the sparse head, and of prompt lookup.

    python scripts/pairs/widen_pair.py exporter/edge_export/reference_pair -o /tmp/wide
    edge-export pair /tmp/wide/target /tmp/wide/drafter -o /tmp/wide-bundle
    python scripts/benchmarks/bench_draft_step.py /tmp/wide-bundle

    python scripts/pairs/make_random_pair.py -o /tmp/e2b --target-layers 5
    edge-export pair /tmp/e2b/target /tmp/e2b/drafter -o /tmp/e2b-bundle --no-verify
    python scripts/benchmarks/bench_draft_step.py /tmp/e2b-bundle

Run it on a quiet machine and quote the ratios.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from edge_devices.command_line import one_sentence_errors
from edge_runtime.backends.llama.context import LlamaOptions
from edge_runtime.backends.llama.crash_probe import probe_load_options
from edge_runtime.backends.llama.drafter import LlamaDrafter
from edge_runtime.backends.llama.pair import open_model_drafter
from edge_runtime.backends.llama.target import LlamaTarget
from edge_runtime.bundle.bundle import Bundle, open_bundle
from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.drafting.text_memory import LookupDrafter
from edge_runtime.interfaces import Drafter
from edge_runtime.session.open import default_threads

# Rounds that are not counted: they fault pages in and start threads.
WARM_UP = 3


def seconds(work: Callable[[], object]) -> float:
    """Returns the duration of one call in seconds."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def quartiles(values: list[float], steps: int) -> dict[str, float]:
    """Returns median and quartiles in milliseconds per step."""
    low, middle, high = (1000 * value / steps for value in statistics.quantiles(values, n=4))
    return {"median_ms": middle, "low_quartile_ms": low, "high_quartile_ms": high}


def draft_steps(drafters: dict[str, Drafter], last: int, draft_length: int, rounds: int) -> dict[str, Any]:
    """Returns milliseconds per step for drafts of one and of `draft_length` tokens; every round runs all drafters in turn."""
    timings: dict[str, dict[int, list[float]]] = {kind: {1: [], draft_length: []} for kind in drafters}
    for number in range(WARM_UP + rounds):
        for kind, drafter in drafters.items():
            for length in timings[kind]:
                passed = seconds(lambda drafter=drafter, length=length: drafter.draft(last, length))  # type: ignore[misc]
                if number >= WARM_UP:
                    timings[kind][length].append(passed)
    return {kind: {str(length): quartiles(values, length) for length, values in by.items()} for kind, by in timings.items()}


def repeating_text(vocabulary: int, count: int) -> list[int]:
    """Returns random token ids whose second half repeats the first, so that prompt lookup finds matches."""
    generator = random.Random(0)
    half = [generator.randrange(vocabulary) for _ in range(count // 2)]
    return half + half


def measure(bundle: Bundle, options: LlamaOptions, tokens: int, draft_length: int, rounds: int) -> dict[str, Any]:
    """Opens all drafters of the bundle on one target and times them after a text of `tokens` tokens."""
    with LlamaTarget(bundle.path("target", "gguf"), options) as target:
        drafters: dict[str, Drafter] = {"llama.cpp": LlamaDrafter(bundle.path("drafter", "gguf"), target, options)}
        drafters["dense"] = open_model_drafter(bundle, target, options, "dense")[0]
        if bundle.has("drafter_head"):
            drafters["split"] = open_model_drafter(bundle, target, options, "split")[0]
        drafters["lookup"] = LookupDrafter(target)
        text = repeating_text(target.vocabulary.size, tokens)
        target.prefill(text[:-1])
        facts = bundle.manifest.architecture
        return {
            "bundle": str(bundle.folder),
            "drafter_hidden_size": facts.drafter_hidden_size,
            "vocabulary": facts.vocab_size,
            "threads": options.threads,
            "tokens": len(text),
            "rounds": rounds,
            "steps": draft_steps(drafters, text[-1], draft_length, rounds),
        }


def table(record: dict[str, Any]) -> Table:
    """Returns one row per drafter and draft length."""
    shape = f"drafter {record['drafter_hidden_size']} wide, vocabulary {record['vocabulary']}"
    made = Table(title=f"{shape}, {record['threads']} threads, medians of {record['rounds']}")
    for column in ("drafter", "draft length", "ms per step", "quartiles", "of llama.cpp"):
        made.add_column(column, justify="left" if column == "drafter" else "right", no_wrap=True)
    for kind, lengths in record["steps"].items():
        for length, figures in lengths.items():
            share = figures["median_ms"] / record["steps"]["llama.cpp"][length]["median_ms"]
            made.add_row(kind, length, f"{figures['median_ms']:.3f}", _spread(figures), f"1/{1 / share:.1f}")
    return made


def _spread(figures: dict[str, float]) -> str:
    return f"{figures['low_quartile_ms']:.3f} to {figures['high_quartile_ms']:.3f}"


@click.command(context_settings={"show_default": True})
@click.argument("folder", metavar="BUNDLE", type=click.Path(path_type=Path))
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: all this process may use]")
@click.option("--tokens", type=click.IntRange(min=4), default=256, help="Length of the text before the draft.")
@click.option("--draft-length", type=click.IntRange(2, MAX_DRAFT_LENGTH), default=3, help="Tokens of the longer draft.")
@click.option("--rounds", type=click.IntRange(min=2), default=50, help="Rounds that count.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the record here.")
@one_sentence_errors()
def main(folder: Path, threads: int | None, tokens: int, draft_length: int, rounds: int, json_path: Path | None) -> None:
    """Time the draft steps of the drafters of BUNDLE."""
    bundle = open_bundle(folder, check="none")
    files = [bundle.file(role, "gguf") for role in ("target", "drafter")]
    paths = [bundle.folder / file.path for file in files]
    notify = Console(stderr=True).print
    answer = probe_load_options(paths[0], paths[1], [file.quantization or "unknown" for file in files], notify=notify)
    options = LlamaOptions(context=tokens, threads=threads or default_threads(), use_extra_bufts=answer.use_extra_bufts)
    record = measure(bundle, options, tokens, draft_length, rounds)
    if json_path is not None:
        json_path.write_text(json.dumps(record, indent=2) + "\n")
    Console().print(table(record))


if __name__ == "__main__":
    main()
