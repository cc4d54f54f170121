"""The HTML report: parsed, and looked at by a browser in dark and in light."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from bench_records import fixed, run, whole_benchmark
from chromium import chromium
from edge_bench.measure.records import BASELINE, collect
from edge_bench.report.figures import Figures, figures
from edge_bench.report.tables import all_tables
from edge_devices.energy.report import make_report
from simulated_session import two_variants

pytest.importorskip("matplotlib", reason="needs edge-mtp[report]")
from edge_bench.report.html import report_page
from edge_bench.report.plots import COLOURS, INK, all_plots

PLOTS = ["speed-by-domain", "speed-by-length", "acceptance", "cost-curve", "phases", "contexts", "energy"]
HOSTILE = "</svg><script>alert(1)</script>$\\frac{1}$"


@pytest.fixture(scope="module")
def energy():
    return make_report(two_variants(), baseline="plain")


@pytest.fixture(scope="module")
def result(energy) -> Figures:
    return figures(collect(whole_benchmark()), energy)


@pytest.fixture(scope="module")
def page(result) -> str:
    return report_page(result)


class Outline(HTMLParser):
    """Collects what a page holds: cells of tables, tags, and addresses of other places."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action", "data"):
                self.references.append(value)

    def handle_data(self, text):
        if self.cells:
            self.cells[-1] += text


def outline(page: str) -> Outline:
    actual = Outline()
    actual.feed(page)
    return actual


def test_the_page_has_every_plot_and_every_figure(page, result):
    actual = outline(page)
    assert [i.removeprefix("plot-") for i in actual.ids if i.startswith("plot-")] == [
        "speed-by-domain",
        "speed-by-length",
        "acceptance",
        "phases",
        "contexts",
        "cost-curve",
        "energy",
    ]
    assert actual.tags.count("svg") == len(PLOTS)
    cells = {cell.strip() for cell in actual.cells}
    for table in all_tables(result):
        for row in table.rows:
            assert {cell.strip() for cell in row} - cells <= {row[-1].strip()}, table.name
    assert any(cell.startswith("1.50 [") for cell in cells)


def test_the_page_needs_nothing_from_anywhere(page):
    actual = outline(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(actual.tags)
    assert all(reference.startswith("#") for reference in actual.references)
    assert "default-src 'none'" in page
    assert not re.search(r"url\((?!#)", page)


def test_plots_are_whole_and_do_not_share_ids(result):
    plots = all_plots(result)
    assert [plot.name for plot in plots] == PLOTS
    observed: set[str] = set()
    for plot in plots:
        root = ET.fromstring(plot.svg)
        ids = {element.get("id") for element in root.iter() if element.get("id")}
        assert not ids & observed
        observed |= ids
        targets = re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', plot.svg)
        assert targets
        assert set(targets) <= ids
        assert root.get("aria-label") == plot.title
        assert "currentColor" in plot.svg
        assert INK not in plot.svg


def test_bars_stand_where_the_figures_are(result):
    (plot,) = [plot for plot in all_plots(result) if plot.name == "speed-by-domain"]
    text = "".join(ET.fromstring(plot.svg).itertext())
    for label in ("code", "prose", "dense 2 (its best length)", "dense rolling", "llama.cpp plain"):
        assert label in text
    assert "dense 4" not in text


def test_a_single_length_and_prompt_make_no_plot_of_a_dot():
    header, *_ = whole_benchmark()
    runs = [run(v, seconds=s, drafted_at=d, accepted_at=d) for v, s, d in ((BASELINE, 1.0, ()), (fixed(1), 0.5, (5,)))]
    names = [plot.name for plot in all_plots(figures(collect([header, *runs])))]
    assert "speed-by-domain" in names
    assert not {"speed-by-length", "acceptance", "contexts"} & set(names)


def test_names_from_outside_stay_text():
    records = whole_benchmark()
    header = replace(records[0], bundle=HOSTILE, machine={"processor": HOSTILE})
    runs = [run(v, domain=HOSTILE, seconds=s, drafted_at=d, accepted_at=d) for v, s, d in ((BASELINE, 1.0, ()), (fixed(2), 0.5, (5,)))]
    page = report_page(figures(collect([header, *runs])))
    actual = outline(page)
    assert "script" not in actual.tags
    assert HOSTILE in actual.cells
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(svg)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_shows_the_plots(page, tmp_path, theme):
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    with chromium(tmp_path / "profile", theme=theme) as driver:
        driver.get((tmp_path / "report.html").as_uri())
        boxes = driver.execute_script(
            "return [...document.querySelectorAll('figure svg')].map(s => { const b = s.getBoundingClientRect();"
            " const t = [...s.querySelectorAll('text')].filter(e => e.getBoundingClientRect().width > 0);"
            " return [b.width, b.height, t.length, getComputedStyle(t[0]).fill, s.querySelectorAll('path,use').length]; })"
        )
        ink, paper = driver.execute_script("const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]")
        complaints = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert len(boxes) == len(PLOTS)
    for width, height, texts, fill, shapes in boxes:
        assert width > 600
        assert height > 250
        assert texts >= 4
        assert shapes >= 5
        assert fill == ink
    assert complaints == []
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, paper)]
    assert (light[0] > light[1]) == (theme == "dark")


def test_series_can_be_seen_on_white_and_on_near_black():
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]  # WCAG 2, relative luminance

    for colour in COLOURS:
        here = luminance(colour)
        assert (1.05 / (here + 0.05)) >= 3.0, colour
        assert ((here + 0.05) / (luminance("#14181d") + 0.05)) >= 3.0, colour
