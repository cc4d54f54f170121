"""The HTML reports of speed and of energy: recomputed from records alone, parsed, and looked at by a browser in dark and in light."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench_records import fixed, run, whole_benchmark
from chromium import chromium
from device_runs import bench, ran
from edge_bench.measure import energy
from edge_bench.measure.energy import fitted, measure_energy, planned_seconds, read_energy
from edge_bench.measure.records import BASELINE, collect
from edge_bench.report.figures import Figures, figures
from edge_bench.report.tables import all_tables
from edge_devices.energy.protocol import Plan
from edge_devices.energy.recorder import Characteristics
from edge_devices.energy.report import make_report
from edge_devices.energy.run_log import RunLog, is_energy_log, write_log
from edge_devices.energy.virtual_meters import PendingExternalMeter
from edge_devices.machine.state import DeviceState
from edge_devices.meters.base import Kind, Trace
from simulated_session import SimulatedMachine, run_protocol, two_variants

pytest.importorskip("matplotlib", reason="needs edge-mtp[report]")

from edge_bench.report.html import report_page
from edge_bench.report.plots import COLOURS, INK, all_plots, energy_plots, power_curve

PLOTS = ["speed-by-domain", "speed-by-length", "acceptance", "cost-curve", "phases", "contexts", "energy"]
HOSTILE = "</svg><script>alert(1)</script>$\\frac{1}$"


@pytest.fixture(scope="module")
def report():
    return make_report(two_variants(), baseline="plain")


@pytest.fixture(scope="module")
def result(report) -> Figures:
    return figures(collect(whole_benchmark()), report)


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


def recorded(kind: Kind, *, refresh_s: float, name: str = "split 3") -> RunLog:
    """Plain decoding at 12 W, drafting at 14 W but faster, and loops of each phase; the second repeat of drafting was throttled."""
    machine = SimulatedMachine(kind, refresh_s=refresh_s)
    workloads = {
        "plain": machine.workload(12.0, prefill_s=0.3, prefill_watts=18.0),
        name: machine.workload(12.0, decode_s=1.2, prefill_s=0.3, prefill_watts=18.0),
        "calibrate:prefill": machine.workload(18.0, tokens=0),
        "calibrate:decode": machine.workload(12.0),
    }
    log = run_protocol(machine, workloads, Plan(repeats=3, rest_s=3.0, warm_ups=1), machine.load)
    at = next(i for i, run in enumerate(log.runs) if run.variant == name)
    log.runs[at] = replace(log.runs[at], after=DeviceState(throttled=0x50005))
    return log


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("energy") / "energy.jsonl"
    write_log(path, recorded(Kind.COUNTER, refresh_s=0.001))
    return path


def test_an_energy_log_is_reported_alone(path: Path) -> None:
    assert is_energy_log(path)
    result = ran("report", path)
    (table,) = [lines for lines in result.stdout.split("\n\n") if "Joules per output token" in lines]
    assert [cell.strip() for cell in table.splitlines()[2].strip("┃").split("┃")] == ["plain", "drafts", "ratio", "interval", "scope"]
    assert re.search(r"│ 0\.48 +│ 0\.288 \(split 3\) │ +0\.60 │ \[0\.\d+, 0\.\d+\] \(n=2\) │ package │", table), table
    assert max(map(len, table.splitlines()[:6])) < 80, "without the note below it"
    assert "split 3 saves energy" in result.stdout
    assert "0x50005" in result.stdout, "repeats that do not count are named"
    wide = bench("report", path, "--wide")
    assert "Energy, all figures, scope package" in wide.stdout
    assert "Energy by phase, scope package" in wide.stdout
    assert "Energy by phase" not in result.stdout
    record = json.loads(bench("report", path, "--json", "-").stdout)
    plain, drafted = record["variants"]
    assert plain["phase_joules"]["prefill"]["value"] == pytest.approx(18.0 * 0.3, rel=1e-3)
    assert plain["phase_joules"]["decode"]["value"] == pytest.approx(12.0 * 2, rel=1e-3)
    assert abs(plain["closure"]) < 0.01
    assert plain["closes"]
    assert drafted["saves_energy"]


def test_the_curve_is_the_devices_power(path: Path) -> None:
    for log in (recorded(Kind.COUNTER, refresh_s=0.001), recorded(Kind.SAMPLER, refresh_s=0.2)):
        curve = power_curve(log.trace)
        run = next(run for run in log.runs if run.variant == "calibrate:decode")
        inside = [w for a, b, w in curve if a > run.start_s and b < run.end_s]
        assert len(inside) > 5
        assert inside == pytest.approx([12.0] * len(inside), rel=1e-3)
        assert len(power_curve(log.trace, 50)) <= 51
        joules = sum((b - a) * w for a, b, w in power_curve(log.trace, 50))
        assert joules == pytest.approx(sum((b - a) * w for a, b, w in curve), rel=0.05)
    assert power_curve(Trace(facts=log.facts)) == []


def test_plots_name_scope_and_estimates(path: Path) -> None:
    log = recorded(Kind.COUNTER, refresh_s=0.001)
    report = make_report(log)
    plots = energy_plots(report, log)
    assert [plot.name for plot in plots] == ["power", "energy", "energy-phases"]
    for plot in plots:
        text = "".join(ET.fromstring(plot.svg).itertext())
        assert "scope package" in text
        assert "scope package (simulated)" in plot.title
    for label in ("idle", "load step", "plain", "split 3", "split 3, refused", "calibrate:decode"):
        assert label in "".join(ET.fromstring(plots[0].svg).itertext())
    assert [plot.name for plot in energy_plots(report)] == ["energy", "energy-phases"]
    assert all(plot.title.startswith("ESTIMATE, nothing was measured") for plot in energy_plots(replace(report, estimate=True), log))


def test_names_in_an_energy_log_stay_text(tmp_path: Path) -> None:
    log = recorded(Kind.SAMPLER, refresh_s=0.2, name=HOSTILE)
    write_log(tmp_path / "log.jsonl", replace(log, facts=replace(log.facts, name=HOSTILE), warnings=[HOSTILE]))
    ran("report", tmp_path / "log.jsonl", "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(svg)


def test_a_browser_shows_power_windows_and_intervals(path: Path, tmp_path: Path) -> None:
    ran("report", path, "--html", tmp_path / "page.html")
    with chromium(tmp_path / "profile", theme="dark") as driver:
        driver.get((tmp_path / "page.html").as_uri())
        heading = driver.execute_script("return document.querySelector('h1').textContent")
        boxes = driver.execute_script(
            "return [...document.querySelectorAll('figure svg')].map(s => [s.getBoundingClientRect().width,"
            " [...s.querySelectorAll('text')].filter(e => e.getBoundingClientRect().width > 0).map(e => e.textContent),"
            " s.querySelectorAll('path').length])"
        )
        cells = driver.execute_script("return [...document.querySelectorAll('td')].map(c => c.textContent)")
        complaints = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert heading == "Energy: simulated, scope package"
    assert len(boxes) == 3
    power, tokens, phases = boxes
    assert all(width > 600 for width, _, _ in boxes)
    assert power[2] > 12 + 12  # a span for each window at least
    assert {"idle", "plain", "W, scope package"} <= set(power[1])
    assert "above idle" in tokens[1]
    assert {"prefill", "decode"} <= set(phases[1])
    reported = [re.fullmatch(r"(0\.\d+) \[(0\.\d+), (0\.\d+)\] \(n=3\)", cell) for cell in cells]
    assert any(m and float(m[2]) <= float(m[1]) <= float(m[3]) and abs(float(m[1]) - 12.0 * 2 / 50) < 0.01 for m in reported)
    assert complaints == []


def test_files_that_do_not_fit_are_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("time,W\n0,1\n1,1\n")
    result = bench("report", path, "--energy", path)
    assert (result.exit_code, "is an energy log itself" in result.stderr) == (1, True)
    result = bench("report", path, "--external", tmp_path / "table.csv")
    assert (result.exit_code, "no load step is visible" in result.stderr) == (1, True)
    (tmp_path / "other.jsonl").write_text("{}\n")
    assert not is_energy_log(tmp_path / "other.jsonl")
    assert not is_energy_log(tmp_path / "nothing")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    assert not is_energy_log(tmp_path / "deep.jsonl")
    assert "needs an energy log" in bench("report", tmp_path / "other.jsonl", "--external", tmp_path / "table.csv").stderr
    assert "No such file" in bench("report", tmp_path / "nothing", "--external", tmp_path / "table.csv").stderr
    assert bench("run", "bundle", "--external", tmp_path / "table.csv").exit_code == 2


@pytest.mark.parametrize("option", ["--markdown", "--trace"])
def test_what_an_energy_log_cannot_give_is_refused(path: Path, option: str, tmp_path: Path) -> None:
    result = bench("report", path, option, tmp_path / "file")
    assert (result.exit_code, "leave --markdown and --trace out" in result.stderr, result.stdout) == (1, True, "")


def meter_of(refresh_s: float, lag_s: float) -> Characteristics:
    return Characteristics(refresh_s=refresh_s, longest_gap_s=2 * refresh_s, lag_s=lag_s, zero_rate=0.0, read_s=0.01)


@pytest.mark.parametrize(
    ("refresh_s", "lag_s", "repeats", "loops"), [(0.001, 0.0, 5, True), (0.2, 0.0, 5, True), (2.0, 2.0, 3, True), (5.0, 5.0, 3, False)]
)
def test_the_protocol_fits_into_its_minutes(refresh_s: float, lag_s: float, repeats: int, loops: bool) -> None:
    workloads = dict.fromkeys(["plain", "profit", "calibrate:prefill", "calibrate:draft", "calibrate:verify", "calibrate:plain"])
    plan, chosen = fitted(Plan(repeats=5), workloads, meter_of(refresh_s, lag_s), 1620)
    assert (plan.repeats, "calibrate:draft" in chosen) == (repeats, loops)
    assert planned_seconds(plan, chosen, meter_of(refresh_s, lag_s)) <= 1620


@pytest.mark.parametrize(
    ("minutes", "repeats", "soak", "words"),
    [
        (5, 3, True, "intervals of 3 repeats are 1.7 times as wide as those of 5"),
        (3, 2, True, "intervals of 2 repeats are 6.3 times as wide as those of 5"),
        (2.5, 2, False, "the device does not warm up first, so that it takes more later; 3 repeats take 4 min: --minutes 4"),
        (1, 1, False, "a single repeat has no interval"),
    ],
)
def test_a_short_measurement_says_what_its_intervals_lose(
    minutes: float, repeats: int, soak: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    plans: list[Plan] = []
    monkeypatch.setattr(energy, "measure", lambda *arguments: plans.append(arguments[4]))
    monkeypatch.setattr(energy, "energy_figures", lambda _: None)
    machine = SimulatedMachine()
    workloads = dict.fromkeys(["plain", "split 3", "calibrate:verify"], machine.workload(12.0))
    measure_energy(tmp_path / "log", machine, workloads, threads=1, system=machine.system, minutes=minutes, notify=said.append)
    assert [(plan.repeats, plan.soak) for plan in plans] == [(repeats, soak)]
    assert words in said[0]


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_measurement_of_few_repeats_has_figures(repeats: int, tmp_path: Path) -> None:
    machine = SimulatedMachine()
    workloads = {"plain": machine.workload(12.0), "split 3": machine.workload(12.0, decode_s=1.2)}
    path = tmp_path / "energy.jsonl"
    measure_energy(path, machine, workloads, threads=1, system=machine.system, repeats=repeats)
    shown = ran("report", path)
    assert ("none: a single repeat" in shown.stdout) == (repeats == 1)


@pytest.mark.parametrize("kind", [Kind.COUNTER, None])
def test_the_whole_protocol_writes_a_log_that_says_the_same(kind: Kind | None, tmp_path: Path) -> None:
    """With a meter the figures come at once; with an external one (None) the log waits for its table."""
    machine = SimulatedMachine()
    path = tmp_path / "energy.jsonl"
    workloads = {"plain": machine.workload(12.0), "split 3": machine.workload(12.0, decode_s=1.2)}
    report, log = measure_energy(path, machine if kind else PendingExternalMeter(), workloads, threads=1, system=machine.system, repeats=2)
    assert is_energy_log(path)
    assert [run.variant for run in log.runs] == ["plain", "split 3", "split 3", "plain"]
    if report is None:
        assert kind is None
        assert len(log.loads) == 3
        result = bench("report", path)
        assert (result.exit_code, "give that meter's table with --external" in result.stderr) == (1, True)
        return
    assert report.to_json() == read_energy(path)[0].to_json()
    assert [v.joules_per_output_token.value for v in report.variants if v.joules_per_output_token] == pytest.approx([0.48, 0.288], rel=1e-3)
