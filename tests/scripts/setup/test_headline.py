"""The figures that README and the docs' home quote come from one file, and a run's figures arrive there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import headline
from bench_records import PEER_PLAIN, header, run, whole_benchmark
from edge_bench.measure.records import RecordFile, collect, read_records
from edge_bench.measure.variants import BASELINE
from edge_bench.report.figures import figures

ENTRY = {
    "processor": "Slow",
    "processors": 4,
    "date": "2026-11-01",
    "engine": "llama.cpp",
    "over_plain": [1.25, 1.0, 1.5],
    "worst_prompt": 0.9,
    "over_llama_cpp": 1.1,
    "equal": 3,
    "compared": 4,
    "demo": "1.20 times as fast as without drafts (1.10 to 1.30 by kind of text), the same output",
}


@pytest.mark.parametrize("page", list(headline.PAGES), ids=lambda page: page.name)
def test_the_pages_quote_the_kept_figures(page: Path):
    text = page.read_text("utf-8")
    assert text == headline.page_with(text, headline.entries_of(), headline.PAGES[page]), "run scripts/setup/headline.py"
    assert text.count("times plain decoding") == len(headline.entries_of()), "a second figure stands beside the generated one"


def test_each_class_of_processors_has_its_clause():
    text = headline.headline([ENTRY, {**ENTRY, "processor": "Fast", "over_plain": [3.5, 3.0, 4.0]}], "results.md").replace("\n", " ")
    assert text.startswith("**3.50 times plain decoding [95% interval 3.00, 4.00], 1.1 times llama.cpp's own")
    assert "3 of 4 runs**: Fast, 4 cores, llama.cpp, 1 November 2026" in text
    assert "1.25 times plain decoding [95% interval 1.00, 1.50]: Slow, 4 cores" in text


def test_the_first_token_follows_where_it_was_measured():
    assert "first token" not in headline.headline([ENTRY], "results.md")
    first = {"prompt_tokens": 511, "milliseconds": 204, "over_llama_cpp": 9.42}
    text = headline.headline([{**ENTRY, "first_token": first}], "results.md").replace("\n", " ")
    assert "**The first token of a prompt of 511 tokens comes after 204 ms, 9.4 times as early as llama.cpp's.**" in text


def test_the_first_token_is_that_of_the_prompt_nearest_to_512():
    prompts = (("64", 0.1, 0.2), ("500", 0.4, 2.0), ("1000", 1.0, 9.0))
    runs = [
        run(variant, part="contexts", domain=length, repeat=repeat, prompt_tokens=int(length), first_token=seconds)
        for length, *both in prompts
        for repeat in range(2)
        for variant, seconds in zip((BASELINE, PEER_PLAIN), both, strict=True)
    ]
    assert headline.first_token(figures(collect([header(), *runs]))) == {"prompt_tokens": 500, "milliseconds": 400, "over_llama_cpp": 5.0}
    assert headline.first_token(figures(collect([header(), *runs[:1]]))) is None
    assert headline.first_token(figures(collect([header()]))) is None


def test_a_page_without_marks_is_refused():
    with pytest.raises(click.ClickException, match="needs <!-- headline -->"):
        headline.page_with("# Title\n", [ENTRY], "results.md")


def test_a_run_without_profit_is_refused(tmp_path: Path):
    path = tmp_path / "runs.jsonl"
    with RecordFile(path) as file:
        for record in whole_benchmark():
            file.add(record)
    with pytest.raises(click.ClickException, match=r"needs plain decoding, profit, llama\.cpp's default"):
        headline.entry(figures(read_records(path)), "Any", "llama.cpp", ENTRY["demo"])


def test_the_command_writes_both_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pages = {Path(shutil.copy(page, tmp_path / page.name)): results for page, results in headline.PAGES.items()}
    kept = tmp_path / "headline.json"
    kept.write_text(json.dumps({"entries": [ENTRY]}))
    monkeypatch.setattr(headline, "PAGES", pages)
    monkeypatch.setattr(headline, "entries_of", lambda: json.loads(kept.read_text())["entries"])
    done = CliRunner().invoke(headline.main, [])
    assert done.exit_code == 0, done.output
    assert all("1.25 times plain decoding" in page.read_text() and ENTRY["demo"] in page.read_text() for page in pages)
