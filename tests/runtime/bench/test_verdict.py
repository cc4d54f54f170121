"""The report's sentence, and what has to be in sight: the output's sameness and whole intervals."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench_records import fixed, header, noisy_runs, rolling, run, whole_benchmark
from chromium import chromium
from edge_bench.measure.records import BASELINE, OURS, Header, Record, Variant, collect
from edge_bench.report.figures import figures
from edge_bench.report.tables import energy_tables, verdict
from edge_devices.energy.intervals import Interval, of_error
from edge_devices.energy.report import EnergyReport, VariantEnergy
from edge_devices.machine.load import MachineLoad

PROFIT = Variant(side=OURS, drafter="dense", policy="profit")
COUNTS = {"drafted_at": (5,), "accepted_at": (4,)}


def judged(*records: Record) -> str:
    first = [] if isinstance(records[0], Header) else [header()]
    return verdict(figures(collect([*first, *records])))


def runs(variant: Variant, seconds: list[float], output: str = "same", **counts: object) -> list[Record]:
    return [run(variant, repeat=i, seconds=s, output=output, **counts) for i, s in enumerate(seconds)]


PLAIN = runs(BASELINE, [1.0, 1.01, 0.99])


@pytest.mark.parametrize(
    ("records", "says"),
    [
        (
            [*PLAIN, *runs(PROFIT, [0.5, 0.505, 0.495], **COUNTS)],
            r"^dense profit is 2\.00 times as fast .*95% \[.*the same in all 3 runs\.$",
        ),
        ([*PLAIN, *runs(PROFIT, [2.0, 2.02, 1.98], **COUNTS)], r"is 0\.50 times as fast as plain decoding \(slower\)"),
        ([*PLAIN, *runs(PROFIT, [1.0, 0.98, 1.03], **COUNTS)], r"is neither faster nor slower"),
        ([*PLAIN, *runs(PROFIT, [1.0, 0.5, 1.5], **COUNTS)], r"was measured too unevenly .* a factor of more than 4"),
        ([*PLAIN, *runs(PROFIT, [0.5, 0.505, 0.495])], r"drafted nothing: .* is noise"),
        ([*PLAIN, *runs(PROFIT, [0.5, 0.505, 0.495], "other", **COUNTS)], r"the same in 0 of 3 runs"),
        ([PLAIN[0], *runs(PROFIT, [0.5], **COUNTS)], r"single repeat, which has no interval"),
        ([*PLAIN, *runs(PROFIT, [0.9] * 3, **COUNTS), *runs(fixed(3), [0.5] * 3, **COUNTS)], r"^dense profit is 1\.1"),
        ([*PLAIN, *runs(rolling(), [0.9] * 3, **COUNTS), *runs(fixed(3), [0.5] * 3, **COUNTS)], r"^dense 3, the fastest of 2 measured, is"),
    ],
)
def test_one_sentence(records: list[Record], says: str) -> None:
    sentence = judged(*records)
    assert re.search(says, sentence), sentence
    assert sentence.count(". ") == 0


def test_the_sentence_and_same_output_are_in_sight_at_1200_pixels(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs edge-mtp[report]")
    from edge_bench.report.html import report_page

    result = figures(collect(whole_benchmark()))
    (tmp_path / "report.html").write_text(report_page(result), encoding="utf-8")
    with chromium(tmp_path / "profile", size=(1200, 900)) as driver:
        driver.get((tmp_path / "report.html").as_uri())
        shown, right, columns, width = driver.execute_script(
            "const p = document.querySelector('.verdict').getBoundingClientRect(), t = document.querySelector('#variants table');"
            "const heads = [...t.querySelectorAll('th')], same = heads.find((h) => h.innerText === 'same output').getBoundingClientRect();"
            "const box = t.parentElement.getBoundingClientRect();"
            "return [p.top, same.right, [box.right, t.getBoundingClientRect().right], innerWidth]"
        )
    assert shown < 150
    assert right < width
    assert columns[1] <= columns[0] + 1, "the whole table fits"


def test_no_whisker_is_clipped_and_what_is_not_determined_has_no_bar() -> None:
    pytest.importorskip("matplotlib", reason="needs edge-mtp[report]")
    from matplotlib.figure import Figure

    from edge_bench.report.plots import _draw_domains

    result = figures(collect([header(), *noisy_runs({"code": 1.5, "prose": 1.2}, repeats=3, seed=1, noise=0.05)]))
    wide = tuple(replace(row, speed_up=replace(row.speed_up, high=157_896_143.0)) for row in result.by_domain if row.speed_up)
    for rows, unknown in ((result.by_domain, 0), (wide, len(wide))):
        axes = Figure().subplots()
        _draw_domains(axes, replace(result, by_domain=rows))
        ends = [float(y) for line in axes.lines for y in line.get_ydata()]
        assert max(ends) <= axes.get_ylim()[1]
        assert [text.get_text() for text in axes.texts] == ["not determined"] * unknown
        assert len(axes.patches) == sum(row.speed_up is not None for row in rows) - unknown
        highs = [row.speed_up.high for row in rows if row.speed_up and row.speed_up.high]
        assert unknown or max(ends) == pytest.approx(max(highs))


def test_a_ratio_that_says_nothing_is_no_number_of_times() -> None:
    """ "has not determined times the speed" was printed of records that are incomplete as well."""
    uneven = judged(header(planned=99), *PLAIN, *runs(PROFIT, [1.0, 0.5, 1.5], **COUNTS))
    assert "dense profit was measured too unevenly to be compared with plain decoding" in uneven
    assert "not determined times" not in uneven


def energy_of(ratio: Interval, *, estimate: bool = False) -> EnergyReport:
    figures = {"joules_per_output_token": of_error(0.5, 0.01, 4, 3)}
    plain = VariantEnergy(name="plain", n=3, refused=[], **figures)
    drafts = VariantEnergy(name="dense profit", n=3, refused=["repeat 1: the board throttled"], ratio_to_baseline=ratio, **figures)
    variants = [plain, drafts]
    return EnergyReport(meter="m", scope="board", estimate=estimate, refresh_s=1.0, systematic="", idle=None, variants=variants)


UNSURE = Interval(value=0.7, low=0.0, high=1.4, n=3, error=1.0, freedom=2.0)
SURE = Interval(value=0.7, low=0.65, high=0.75, n=3, error=0.01, freedom=2.0)


@pytest.mark.parametrize(
    ("ratio", "estimate", "words", "cells"),
    [
        (
            SURE,
            False,
            "it takes 0.70 [0.65, 0.75] times the joules per token of plain decoding (measured, board)",
            ("0.70", "[0.65, 0.75] (n=3)"),
        ),
        (
            UNSURE,
            False,
            "how many joules per token it takes beside plain decoding is not determined",
            ("not determined", "n=3, the runs differ"),
        ),
        (
            UNSURE,
            True,
            "it takes 0.70 [0.00, 1.40] times the joules per token of plain decoding (an ESTIMATE, nothing",
            ("0.70", "[0.00, 1.40]"),
        ),
    ],
)
def test_joules_beside_plain_decoding(ratio: Interval, estimate: bool, words: str, cells: tuple[str, str]) -> None:
    """An estimate that somebody asked for is shown with its range, however wide: its label says what it is."""
    records = collect([header(), *PLAIN, *runs(PROFIT, [0.5, 0.505, 0.495], **COUNTS)])
    report = energy_of(ratio, estimate=estimate)
    assert words in verdict(figures(records, report))
    (table,) = energy_tables(report, wide=False)
    ((plain, drafts, ratio_cell, interval, scope),) = table.rows
    assert (plain, drafts, ratio_cell, scope) == ("0.5", "0.5 (dense profit)", cells[0], "ESTIMATE, not measured" if estimate else "board")
    assert interval.startswith(cells[1])
    assert "Repeats that do not count: dense profit, repeat 1: the board throttled" in table.note


def test_nothing_is_claimed_of_incomplete_or_disturbed_records() -> None:
    busy = MachineLoad(others=0.98, waiting=0.5, seconds=1.0)
    runs = [replace(each, drafted=5, accepted=4) for each in noisy_runs({"a": 3.0, "b": 3.0}, repeats=3, seed=1)]
    whole = header(planned=len(runs))
    assert " times as fast as " in verdict(figures(collect([whole, *runs])))
    quiet = [replace(each, load=replace(busy, others=0.01, waiting=0.01)) for each in runs]
    assert figures(collect([whole, *quiet])).doubts == ()
    cut = figures(collect([whole, *quiet[:-2]]))
    assert (cut.doubts, cut.overall[1].claim) == ((f"incomplete: {len(runs) - 2} of {len(runs)} measurements",), "incomplete")
    disturbed = figures(collect([whole, *quiet[:-2], *(replace(each, load=busy) for each in runs[-2:])]))
    assert disturbed.overall[1].claim == "disturbed"
    assert "the machine was busy for 17% of the time" in disturbed.doubts[0]
    for doubtful in (cut, disturbed):
        assert verdict(doubtful).startswith(f"Nothing follows from these figures. They are {doubtful.doubts[0]}. dense 3 has ")
        assert "faster" not in [row.claim for row in doubtful.overall]
        assert " as fast as " not in verdict(doubtful)
