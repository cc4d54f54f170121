"""Keeps the figures of README's table in docs/records/headline.json, and writes the table of README and of the docs' home from it.

    edge-run demo demo-bundle-onnx >demo.txt
    .venv/bin/python scripts/benchmarks/bench_peers.py peers/bundle --peers peers --runs peers.jsonl
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

from edge_bench.measure.records import DEFAULT, LLAMA_CPP, OURS, PLAIN, read_records
from edge_bench.report.figures import Figures, figures
from edge_devices.command_line import one_sentence_errors

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "records" / "headline.json"
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")
PROFIT = "profit"
LITERT_LM = "LiteRT-LM"
DEMO_SENTENCE = re.compile(r"\d[\d.]* times as fast as without drafts \([^)]*\), [^;.]+")
BEGIN, END = "<!-- speed -->\n", "\n<!-- end of speed -->"
HEAD = """\
| tokens per second on | without drafts | **with drafts** | llama.cpp's default | LiteRT-LM's best |
|:--|--:|--:|--:|--:|
"""
ARM = "| any ARM processor | not measured | not measured | not measured | not measured |"
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
        "tokens_per_second": speeds(result),
        "over_llama_cpp": round(over[0].value, 3),
        "equal": ours.equal,
        "compared": ours.compared,
        "demo": sentence[0],
    }


def speeds(result: Figures) -> dict[str, float]:
    """Returns the median tokens per second of each column of the table; of a program that did not run, none."""
    rows = {(row.variant.side, row.variant.policy): round(row.tokens_per_second, 1) for row in result.overall}
    litert = [speed for (side, _), speed in rows.items() if side.startswith(LITERT_LM)]
    columns = {"plain": rows[OURS, PLAIN], "drafts": rows[OURS, PROFIT], "llama_cpp": rows[LLAMA_CPP, DEFAULT]}
    return columns | ({"litert_lm": max(litert)} if litert else {})


def table(entries: list[Entry]) -> str:
    """Returns the table with a row for each class of processors, the best-served class first."""
    ordered = sorted(entries, key=lambda each: -each["over_plain"][0])
    return HEAD + "\n".join([*map(_row, ordered), ARM])


def _row(each: Entry) -> str:
    speed = each["tokens_per_second"]
    date = datetime.fromisoformat(each["date"])
    where = f"{each['processor']}, {each['processors']} cores, {date.day} {date:%B %Y}"
    theirs = (f"{speed[name]:.0f}" if name in speed else "not run" for name in ("llama_cpp", "litert_lm"))
    return f"| {where} | {speed['plain']:.0f} | **{speed['drafts']:.0f}** | {' | '.join(theirs)} |"


def page_with(text: str, entries: list[Entry]) -> str:
    """Returns a page with what stands between its marks made anew. Raises ClickException if a mark is missing."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise click.ClickException(f"the page needs {BEGIN.strip()} and {END.strip()} once")
    return text[: text.index(BEGIN) + len(BEGIN)] + table(entries) + text[text.index(END) :]


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
    for page in PAGES:
        page.write_text(page_with(page.read_text("utf-8"), entries_of()), "utf-8")


if __name__ == "__main__":
    main()
