"""Figures from records: paired ratios, their intervals, tables, the verdict in words, and files that come back the same."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench_records import PEER_PLAIN, fixed, header, noisy_runs, rolling, run, whole_benchmark
from chromium import chromium
from edge_bench.measure.records import BASELINE, LLAMA_CPP, OURS, Header, Record, RecordFile, Variant, collect, line_of, read_records
from edge_bench.report import figures as report
from edge_bench.report.figures import best_fixed, figures, paired_logs, ratio
from edge_bench.report.tables import all_tables, energy_tables, machine_line, markdown, notes, verdict
from edge_devices.energy.intervals import Interval, of_error
from edge_devices.energy.report import EnergyReport, VariantEnergy
from edge_devices.errors import EdgeError, markdown_text
from edge_devices.files.atomic_write import write_text
from edge_devices.machine.processors import MachineLoad
from edge_runtime.bundle.manifest import FIGURES_OF, files_key
from edge_runtime.errors import RequestError


def ratio_of(runs):
    return ratio(paired_logs([r for r in runs if r.variant == fixed(3)], [r for r in runs if r.variant == BASELINE]))


def test_ratio_is_the_geometric_mean_over_domains_of_median_pairs():
    runs = []
    for domain, seconds in (("a", (0.5, 0.5, 9.0)), ("b", (2.0, 2.0, 2.0))):
        for repeat, used in enumerate(seconds):
            runs += [run(BASELINE, domain=domain, repeat=repeat), run(fixed(3), domain=domain, repeat=repeat, seconds=used)]
    actual = ratio_of(runs)
    assert actual.value == pytest.approx(1.0)
    assert (actual.worst, actual.pairs) == (pytest.approx(0.5), 6)


def test_drift_that_both_sides_have_cancels_out():
    runs = noisy_runs({"a": 1.25}, repeats=6, seed=1, noise=0.0, drift=0.5)
    actual = ratio_of(runs)
    assert (actual.value, actual.low, actual.high) == pytest.approx((1.25, 1.25, 1.25))
    assert actual.verdict == "faster"


def test_one_repeat_gives_no_interval_and_no_claim():
    actual = ratio_of(noisy_runs({"a": 3.0}, repeats=1, seed=1))
    assert (actual.low, actual.high, actual.verdict) == (None, None, "")


def test_ratios_are_computed_once_for_each_variant(monkeypatch):
    """The best length was looked for again for each length: with 1,000 of them a stranger's record took hours."""
    runs, asked = [run(fixed(n + 1), domain=f"d{n}") for n in range(20)], []
    runs += [run(BASELINE, domain=f"d{n}") for n in range(20)] + [run(PEER_PLAIN)]
    monkeypatch.setattr(report, "ratio", lambda logs: asked.append(logs) or ratio(logs))
    figures(collect([header(), *runs]))
    assert len(asked) < 5 * 20


def test_without_pairs_there_is_no_ratio():
    assert ratio_of([run(BASELINE, repeat=0), run(fixed(3), repeat=1)]) is None


@pytest.mark.parametrize(("repeats", "domains"), [(2, 5), (3, 1), (6, 5)])
def test_intervals_hold_the_truth_about_as_often_as_they_say(repeats, domains):
    truths = {f"d{n}": 0.8 + 0.2 * n for n in range(domains)}
    mean = 1.0
    for truth in truths.values():
        mean *= truth ** (1 / domains)
    actual = [ratio_of(noisy_runs(truths, repeats=repeats, seed=seed)) for seed in range(250)]
    held = sum(r.low <= mean <= r.high for r in actual) / len(actual)
    assert 0.90 <= held <= 1.0


def test_rows_say_what_the_records_say():
    result = figures(collect(whole_benchmark()))
    rows = {row.variant: row for row in result.overall}
    assert rows[BASELINE].speed_up is None
    assert rows[BASELINE].tokens_per_second == pytest.approx(10 / 1.1)
    two = rows[fixed(2)]
    assert two.speed_up.value == pytest.approx(1.5)
    assert (two.acceptance_rate, two.acceptance_by_position, two.mean_acceptance_length) == (0.5, (0.8, 0.2), 2.0)
    assert two.token_p50_seconds == pytest.approx(1.1 / 1.5 / 10)
    assert two.phase_seconds_per_token == pytest.approx({"draft": 0.011 / 1.5, "verify": 0.055 / 1.5, "other": 0.044 / 1.5})
    assert (two.equal, two.compared) == (6, 6)
    peer = rows[fixed(2, LLAMA_CPP)]
    assert peer.speed_up.value == pytest.approx(0.5)
    assert (peer.acceptance_rate, peer.compared) == (None, 0)
    assert {row.domain for row in result.by_domain} == {"code", "prose"}


def test_ours_is_held_against_the_peers_best_length_and_its_plain_decoding():
    result = figures(collect(whole_benchmark()))
    over = {(a.ours, a.peer): a.ratio.value for a in result.against}
    assert over[rolling(), fixed(2, LLAMA_CPP)] == pytest.approx(2.4)
    assert over[fixed(2), PEER_PLAIN] == pytest.approx(1.5)
    assert (fixed(4), PEER_PLAIN) not in over, "only our best length is shown"
    groups = {v: [run(v, seconds=s)] for v, s in ((BASELINE, 1.0), (fixed(1), 2.0), (fixed(2), 0.5))}
    assert best_fixed(groups, "edge-mtp") == fixed(2)
    assert best_fixed(groups, LLAMA_CPP) is None


def test_a_prompts_length_stands_beside_its_first_token():
    result = figures(
        collect([header(), *(run(BASELINE, repeat=n, prompt_tokens=40, first_token=s) for n, s in enumerate((0.2, 0.4, 0.1)))])
    )
    (row,) = result.overall
    assert (row.prompt_tokens, row.first_token_seconds, row.prompt_tokens_per_second) == (40, 0.2, pytest.approx(200))
    (table,) = (table for table in all_tables(result) if table.name == "variants")
    place = table.columns.index("prompt tokens")
    assert table.rows[0][place : place + 3] == ("40", "200.0", "200")


def test_first_tokens_are_listed_by_prompt_length_for_plain_decoding_of_every_side():
    runs = [run(v, part="contexts", domain=n, prompt_tokens=int(n)) for n in ("128", "512") for v in (BASELINE, rolling(), PEER_PLAIN)]
    (table,) = (table for table in all_tables(figures(collect([header(), *runs]))) if table.name == "first-token")
    assert table.rows == tuple((v.label, n, "200.0", f"{int(n) / 0.2:.0f}") for v in (BASELINE, PEER_PLAIN) for n in ("128", "512"))


@pytest.mark.parametrize(
    ("row_kernels", "words"),
    [("avx2", "2 threads, row kernels avx2;"), ("none", "2 threads, no row kernels: standard operators;"), (None, "2 threads;")],
)
def test_the_line_above_the_tables_names_the_row_kernels(row_kernels, words):
    assert words in machine_line(header(row_kernels=row_kernels))


def test_headers_of_earlier_versions_name_no_engines(tmp_path):
    lines = [json.loads(line_of(record)) for record in (header(engines={"onnxruntime": "1.31.0"}), run(BASELINE))]
    assert "edge-mtp 0, onnxruntime 1.31.0" in machine_line(header(engines=lines[0]["engines"]))
    del lines[0]["engines"]
    (tmp_path / "old.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_records(tmp_path / "old.jsonl").header.engines == {}


def test_tables_have_as_many_cells_as_columns_and_only_what_was_measured():
    result = figures(collect(whole_benchmark()))
    tables = {table.name: table for table in all_tables(result)}
    names = "variants domains against acceptance phases contexts first-token costs concurrency kv memory"
    assert set(tables) == set(names.split())
    for table in tables.values():
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert "a processor, 2 processors, 2 threads" in machine_line(result.records.header)
    assert result.records.rows is not None
    assert notes(result) == ["something was left out", result.records.rows.sentence()]
    assert result.to_json()["rows"]["verdict"] == "drafts may change the text"
    only_plain = figures(collect([header(), run(BASELINE)]))
    assert {table.name for table in all_tables(only_plain)} == {"variants", "phases", "memory"}


def test_outputs_that_differ_are_said():
    records = [header(), *(run(v, output=o) for v, o in ((BASELINE, "a"), (fixed(3), "b")))]
    result = figures(collect(records))
    assert "1 of 2 outputs differ" in notes(result)[0]


def test_records_come_back_from_their_file(tmp_path):
    path = tmp_path / "run.jsonl"
    records = whole_benchmark()
    with RecordFile(path) as file:
        for record in records:
            file.add(record)
        assert not path.exists()
    assert list(tmp_path.iterdir()) == [path]
    assert read_records(path) == collect(records)


def interrupted(path, records):
    with RecordFile(path) as file:
        for record in records:
            file.add(record)
        raise KeyboardInterrupt


def test_an_error_keeps_what_was_measured_and_nothing_where_nothing_was(tmp_path):
    path = tmp_path / "run.jsonl"
    for records in ([header()], [header(), run(BASELINE)]):
        with pytest.raises(KeyboardInterrupt):
            interrupted(path, records)
        assert [p.name for p in tmp_path.iterdir()] == (["run.jsonl"] if len(records) > 1 else [])


def test_places_that_cannot_be_written_are_refused(tmp_path):
    for refused in (lambda p: RecordFile(p), lambda p: write_text(p, ["x"])):
        with pytest.raises(EdgeError, match="choose another place"):
            refused(tmp_path / "missing" / "file")
    (tmp_path / "folder").mkdir()
    with pytest.raises(EdgeError, match="choose another place"):
        write_text(tmp_path / "folder", ["x"])
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def spoiled(**changes):
    data = json.loads(line_of(run(fixed(3), drafted_at=(2, 2), accepted_at=(1, 1))))
    return json.dumps(data | changes)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "{",
        "null",
        "[" * 100_000,
        '{"kind": "else"}',
        line_of(header()),
        '{"kind": "run"}',
        spoiled(seconds=0),
        spoiled(seconds=float("nan")),
        spoiled(seconds=-1.0),
        spoiled(seconds="1"),
        spoiled(tokens=0),
        spoiled(tokens=10**400),
        spoiled(seconds=10**400),
        spoiled(accepted=9),
        spoiled(drafted_at=[1]),
        spoiled(accepted_at=[3, 1]),
        spoiled(round_tokens=[1]),
        spoiled(variant=None),
        spoiled(variant={"side": "x"}),
        spoiled(kind=[]),
        spoiled(seconds=5e-324),
        spoiled(first_token_seconds=5e-324),
        spoiled(accepted_from={"mtp": 10**18}),
        spoiled(round_drafted=[10**9], round_accepted=[0], round_draft_seconds=[0], round_verify_seconds=[0]),
        '{"kind": "note"}',
        '{"kind": "cost_curve", "drafter": "d", "length": 1, "verify_seconds": [-1], "draft_step_seconds": null}',
    ],
)
def test_lines_that_no_benchmark_wrote_are_refused(tmp_path, line):
    path = tmp_path / "run.jsonl"
    path.write_text(line_of(header()) + line + "\n")
    with pytest.raises(RequestError, match="line 2 is not a valid record"):
        read_records(path)


@pytest.mark.parametrize("text", ["", line_of(run(BASELINE)), line_of(header(schema=2)), '{"kind": "header"}\n'])
def test_files_without_a_header_are_refused(tmp_path, text):
    (tmp_path / "run.jsonl").write_text(text)
    with pytest.raises(RequestError, match=r"run\.jsonl"):
        read_records(tmp_path / "run.jsonl")


def test_the_share_of_each_source_adds_up():
    runs = [
        replace(run(fixed(3), drafted_at=(9,), accepted_at=(6,), repeat=i), accepted_from=actual)
        for i, actual in enumerate(({"drafter": 4, "memory": 2}, {"drafter": 5, "grammar": 1}))
    ]
    (row,) = figures(collect([header(), *runs])).overall
    assert row.accepted_from == {"drafter": 0.45, "grammar": 0.05, "memory": 0.1}
    (table,) = [item for item in all_tables(figures(collect([header(), *runs]))) if item.name == "sources"]
    assert table.columns[1:] == ("drafter", "grammar", "memory", "model")
    assert table.rows[0][1:] == ("45.0%", "5.0%", "10.0%", "40.0%")


def test_markdown_has_every_figure_and_no_markup_of_records():
    own = header(bundle="<img>`|[x](y)\x1b")
    result = figures(collect([own, *whole_benchmark()[1:]]))
    lines = markdown(result).splitlines()
    assert lines[0] == FIGURES_OF.format(files_key(own.files))
    assert lines[1].startswith("## Measured: &lt;img&gt;'\\|\\[x](y)\\x1b (model q4_0) on a processor")
    for table in all_tables(result):
        assert {f"| {' | '.join(map(markdown_text, row))} |" for row in table.rows} <= {*lines}


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
