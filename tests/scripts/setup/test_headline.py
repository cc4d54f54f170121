"""The table of README and of the docs' home comes from one file, and a run's figures arrive there."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

import headline
from bench_records import whole_benchmark
from edge_bench.measure.records import RecordFile, read_records
from edge_bench.report.figures import figures

ENTRY = {
    "processor": "Slow",
    "processors": 4,
    "date": "2026-11-01",
    "engine": "llama.cpp",
    "over_plain": [1.25, 1.0, 1.5],
    "worst_prompt": 0.9,
    "tokens_per_second": {"plain": 10.0, "drafts": 12.5, "llama_cpp": 11.4},
    "over_llama_cpp": 1.1,
    "equal": 3,
    "compared": 4,
    "demo": "1.20 times as fast as without drafts (1.10 to 1.30 by kind of text), the same output",
}


@pytest.mark.parametrize("page", headline.PAGES, ids=lambda page: page.name)
def test_the_pages_quote_the_kept_figures(page: Path):
    text = page.read_text("utf-8")
    assert text == headline.page_with(text, headline.entries_of()), "run scripts/setup/headline.py"


def test_each_class_of_processors_has_its_row():
    fast = {
        **ENTRY,
        "processor": "Fast",
        "over_plain": [3.5, 3.0, 4.0],
        "tokens_per_second": {**ENTRY["tokens_per_second"], "litert_lm": 9.6},
    }
    rows = headline.table([ENTRY, fast]).splitlines()[2:]
    assert rows == [
        "| Fast, 4 cores, 1 November 2026 | 10 | **12** | 11 | 10 |",
        "| Slow, 4 cores, 1 November 2026 | 10 | **12** | 11 | not run |",
        headline.ARM,
    ]


def test_a_page_without_marks_is_refused():
    with pytest.raises(click.ClickException, match="needs <!-- speed -->"):
        headline.page_with("# Title\n", [ENTRY])


def test_a_run_without_profit_is_refused(tmp_path: Path):
    path = tmp_path / "runs.jsonl"
    with RecordFile(path) as file:
        for record in whole_benchmark():
            file.add(record)
    with pytest.raises(click.ClickException, match=r"needs plain decoding, profit, llama\.cpp's default"):
        headline.entry(figures(read_records(path)), "Any", "llama.cpp", ENTRY["demo"])
