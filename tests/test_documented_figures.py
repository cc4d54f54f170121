"""Figures of the pages that have a record in docs/records equal it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def record(name: str) -> Any:
    return json.loads((DOCS / "records" / f"{name}.json").read_text(encoding="utf-8"))


def cells(page: str, row: str) -> list[str]:
    """The cells behind the first ones of the table's row that begins with `row`."""
    lines = [line for line in (DOCS / page).read_text(encoding="utf-8").splitlines() if line.startswith(f"| {row} |")]
    assert len(lines) == 1, f"{page} has {len(lines)} rows that begin with {row}"
    return [cell.strip() for cell in lines[0].removeprefix(f"| {row} |").strip(" |").split("|")]


def interval(value: float, low: float, high: float) -> str:
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


@pytest.mark.parametrize(
    ("row", "name", "device"),
    [("GGUF, CPU", "h200-vulkan", "cpu"), ("GGUF, Vulkan", "h200-vulkan", "vulkan0"), ("GGUF, CUDA", "h200-cuda", "cuda0")],
)
def test_speeds_of_the_gpu_are_those_of_its_record(row: str, name: str, device: str) -> None:
    (figures,) = (each["figures"] for each in record(name)["devices"] if each["device"] == device)
    rows = {(each["variant"]["policy"], each["variant"]["length"]): each for each in figures["overall"]}
    speeds = [f"{rows[key]['tokens_per_second']:,.0f}" for key in (("plain", None), ("fixed", 3), ("profit", None))]
    gain = rows["profit", None]["speed_up"]
    assert cells("accelerators.md", row) == [*speeds, interval(gain["value"], gain["low"], gain["high"])]


def test_results_have_the_kept_figures_of_each_class_of_processors() -> None:
    text = " ".join((DOCS / "results.md").read_text(encoding="utf-8").split())
    for entry in record("headline")["entries"]:
        assert interval(*entry["over_plain"]) in text, entry["processor"]
        assert f"{entry['over_llama_cpp']:.2f}" in re.findall(r"\d\.\d\d", text), entry["processor"]
