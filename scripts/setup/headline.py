"""Keeps the figures that README and the docs' home quote in docs/records/headline.json, and writes both pages from it.

    edge-run demo demo-bundle-onnx >demo.txt
    .venv/bin/python scripts/benchmarks/bench_peers.py --runs peers.jsonl
    .venv/bin/python scripts/setup/headline.py peers.jsonl --processor "Intel Xeon with AVX-512 VNNI" --demo demo.txt
    .venv/bin/python scripts/setup/headline.py          # only writes the pages anew

A class of processors has one entry, and a new measurement takes the place of the old one.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from edge_bench.measure.records import read_records
from edge_bench.measure.runners import CONTEXTS_PART
from edge_bench.measure.variants import DEFAULT, LLAMA_CPP, OURS, PLAIN
from edge_bench.report.figures import Figures, figures, first_token_ratio
from edge_devices.command_line import one_sentence_errors

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "records" / "headline.json"
PAGES = {ROOT / "README.md": "docs/results.md", ROOT / "docs" / "index.md": "results.md"}
PROFIT = "profit"
PROMPT_TOKENS = 512
DEMO_SENTENCE = re.compile(r"\d[\d.]* times as fast as without drafts \([^)]*\), [^;.]+")
Entry = dict[str, Any]


def entry(result: Figures, processor: str, engine: str, demo: str) -> Entry:
    """Returns the figures of a run of bench_peers.py with repeats. Raises ClickException if it lacks `profit` or llama.cpp's default."""
    ours = next((row for row in result.overall if row.variant.side == OURS and row.variant.policy == PROFIT), None)
    over = [
        each.ratio for each in result.against if each.ours.policy == PROFIT and (each.peer.side, each.peer.policy) == (LLAMA_CPP, DEFAULT)
    ]
    sentence = DEMO_SENTENCE.search(" ".join(demo.split()))
    if ours is None or ours.speed_up is None or ours.speed_up.low is None or not over or sentence is None:
        raise click.ClickException("the run needs plain decoding, profit, llama.cpp's default and two repeats; the demo its last sentence")
    return {
        "processor": processor,
        "processors": result.records.header.machine["usable_processors"],
        "date": result.records.header.created_at[:10],
        "engine": engine,
        "over_plain": [round(value, 3) for value in (ours.speed_up.value, ours.speed_up.low, ours.speed_up.high) if value],
        "worst_prompt": round(ours.speed_up.worst, 3),
        "over_llama_cpp": round(over[0].value, 3),
        "equal": ours.equal,
        "compared": ours.compared,
        "demo": sentence[0],
        **({"first_token": first} if (first := first_token(result)) else {}),
    }


def first_token(result: Figures) -> Entry | None:
    """Returns ms until the first token of the prompt nearest to PROMPT_TOKENS, and how many times as early as llama.cpp's it comes.

    None for a run that lacks prompts of a length, or llama.cpp's.
    """
    runs = [run for run in result.records.runs if run.part == CONTEXTS_PART and run.variant.policy == PLAIN]
    rows = [row for row in result.by_context if (row.variant.side, row.variant.policy) == (OURS, PLAIN)]
    row = min(rows, key=lambda each: abs(each.prompt_tokens - PROMPT_TOKENS), default=None)
    if row is None or row.first_token_seconds is None:
        return None
    ours, theirs = ([run for run in runs if (run.variant.side, run.domain) == (side, row.domain)] for side in (OURS, LLAMA_CPP))
    earlier = first_token_ratio(ours, theirs)
    figures_of_it = {"prompt_tokens": round(row.prompt_tokens), "milliseconds": round(1000 * row.first_token_seconds)}
    return figures_of_it | {"over_llama_cpp": round(earlier.value, 3)} if earlier else None


def headline(entries: list[Entry], results: str) -> str:
    """Returns the paragraph with a clause for each class of processors, the best-served class first."""
    first, *others = sorted(entries, key=lambda each: -each["over_plain"][0])
    text = [
        f"**{_times(first)}, {first['over_llama_cpp']:.1f} times llama.cpp's own speculative default, the same output in "
        f"{first['equal']} of {first['compared']} runs**: {_where(first)}, a small pair widened to a phone-sized model's cost, "
        f"default settings.",
        *(_first_token(each) for each in (first,) if "first_token" in each),
        *(f"{_times(each)[0].upper()}{_times(each)[1:]}: {_where(each)}." for each in others),
        f"ARM was not measured. Yours: `make demo`. [Results]({results}).",
    ]
    return _wrapped(" ".join(text))


def _first_token(each: Entry) -> str:
    prompt = each["first_token"]
    return (
        f"**The first token of a prompt of {prompt['prompt_tokens']} tokens comes after {prompt['milliseconds']} ms, "
        f"{prompt['over_llama_cpp']:.1f} times as early as llama.cpp's.**"
    )


def demo(entries: list[Entry]) -> str:
    """Returns the demo's last sentence on the best-served class, as a transcript."""
    first = max(entries, key=lambda each: float(each["over_plain"][0]))
    return f"```text\n{first['demo']}\n```\n\n({_where(first)})"


def _times(each: Entry) -> str:
    value, low, high = each["over_plain"]
    return f"{value:.2f} times plain decoding [95% interval {low:.2f}, {high:.2f}]"


def _where(each: Entry) -> str:
    date = datetime.fromisoformat(each["date"])
    return f"{each['processor']}, {each['processors']} cores, {each['engine']}, {date.day} {date:%B %Y}"


def _wrapped(text: str, width: int = 100) -> str:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        lines = [*lines[:-1], longer] if len(longer) <= width else [*lines, word]
    return "\n".join(lines)


def page_with(text: str, entries: list[Entry], results: str) -> str:
    """Returns a page with what stands between its marks made anew. Raises ClickException if a mark is missing."""
    for name, block in (("headline", headline(entries, results)), ("demo", demo(entries))):
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise click.ClickException(f"the page needs {begin.strip()} and {end.strip()} once")
        text = text[: text.index(begin) + len(begin)] + block + text[text.index(end) :]
    return text


def entries_of(path: Path = RESULTS) -> list[Entry]:
    """Returns the kept entries."""
    return list(json.loads(path.read_text("utf-8"))["entries"])


@click.command()
@click.argument("runs", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=False)
@click.option("--processor", help="The class of processors, such as 'Intel Xeon with AVX-512 VNNI'.")
@click.option("--engine", type=click.Choice(["ONNX Runtime", "llama.cpp"]), default="ONNX Runtime", help="The engine that was measured.")
@click.option("--demo", "transcript", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="What edge-run demo printed.")
@one_sentence_errors()
def main(runs: Path | None, processor: str | None, engine: str, transcript: Path | None) -> None:
    """Keep the figures of RUNS, and write README.md and docs/index.md from what is kept."""
    if runs is not None:
        if not processor or not transcript:
            raise click.UsageError("RUNS needs --processor and --demo")
        added = entry(figures(read_records(runs)), processor, engine, transcript.read_text("utf-8"))
        kept = [each for each in (entries_of() if RESULTS.exists() else []) if each["processor"] != processor]
        RESULTS.write_text(json.dumps({"entries": [*kept, added]}, indent=2) + "\n", "utf-8")
    for page, results in PAGES.items():
        page.write_text(page_with(page.read_text("utf-8"), entries_of(), results), "utf-8")


if __name__ == "__main__":
    main()
