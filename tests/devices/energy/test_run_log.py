"""The raw record of a measurement: written, read again, refused when damaged."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from edge_bench.cli.main import main
from edge_devices.energy.protocol import Plan
from edge_devices.energy.report import make_report
from edge_devices.energy.run_log import MAX_OF_KIND, LogFile, read_log, write_log
from edge_devices.errors import MeasurementError
from simulated_session import SimulatedMachine, run_protocol


def test_everything_is_recomputed_from_the_log(log, tmp_path):
    path = tmp_path / "run.jsonl"
    write_log(path, log)
    assert make_report(read_log(path), baseline="plain").to_json() == make_report(log, baseline="plain").to_json()
    result = CliRunner().invoke(main, ["report", str(path), "--json", "-"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["variants"][1]["saves_energy"] is True
    text = CliRunner().invoke(main, ["report", str(path)]).output
    assert "scope package" in text
    assert "saves energy" in text
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}\n",
        "no json\n",
        '{"kind": "header", "schema": 9, "meter": {}, "environment": {}}\n',
        '{"kind": "sample", "t": 0, "v": 0}\n',
        "[1]\n",
        '{"kind": "header", "schema": 1, "meter": {"name": "x", "kind": "counter", "scope": "nowhere"}, "environment": {}}\n',
    ],
)
def test_damaged_logs_are_refused(tmp_path, text):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(MeasurementError, match=r"run\.jsonl"):
        read_log(path)
    result = CliRunner().invoke(main, ["report", str(path)])
    assert result.exit_code == 1
    assert "Traceback" not in result.output


def test_logs_with_figures_that_are_none_are_refused(tmp_path, log):
    path = tmp_path / "run.jsonl"
    write_log(path, log)
    lines = path.read_text().splitlines()
    run = next(line for line in lines if '"kind": "run"' in line)
    strange = [
        run.replace('"phases": {}', '"phases": {"draft": "x"}'),
        run.replace('"throttled": null', '"throttled": "x"'),
        run.replace('"expected_s": null', '"expected_s": "x"'),
    ]
    assert run not in strange
    for bad in ('{"kind": "sample", "t": 0, "v": NaN}', '{"kind": "sample", "t": -1e9, "v": 0}', *strange):
        path.write_text("\n".join([*lines, bad]))
        with pytest.raises(MeasurementError):
            read_log(path)


def test_what_no_measurement_has_is_refused_before_it_costs_anything(tmp_path, log):
    path = tmp_path / "run.jsonl"
    write_log(path, log)
    lines = path.read_text().splitlines()
    run = json.loads(next(line for line in lines if '"kind": "run"' in line))
    inside = {"start_s": run["start_s"] + 0.1, "end_s": run["end_s"] - 0.1}
    last = log.trace.times[-1]
    later = [{**run, "start_s": last + i, "end_s": last + i + 0.5} for i in range(MAX_OF_KIND["run"])]
    fault = {"kind": "fault", "reason": "unplugged"}
    for words, added in (
        ("before another ends", [{**run, **inside}]),
        ("before another ends", [{"kind": "idle", "start": run["start_s"] - 0.1, "end": run["end_s"]}]),
        ("before another ends", [{"kind": "idle", "start": float("nan"), "end": 1.0}]),
        ("more than 5000 lines of the kind 'run'", later),
        (
            "more than 1000 lines of the kind 'idle'",
            [{"kind": "idle", "start": last + i, "end": last + i + 1} for i in range(MAX_OF_KIND["idle"])],
        ),
        ("more than 1000 lines of the kind 'warning'", [{"kind": "warning", "text": ""}] * 1001),
        ("17 phases; 16 are the most", [{**later[0], "phases": {str(i): 0.1 for i in range(17)}}]),
        ("a fault at 1.0 s after one at 2.0 s", [{**fault, "t": 2.0}, {**fault, "t": 1.0}]),
    ):
        path.write_text("".join(line + "\n" for line in (*lines, *map(json.dumps, added))))
        with pytest.raises(MeasurementError, match=words):
            read_log(path)
    legal = [*later[: MAX_OF_KIND["run"] - len(log.runs)], {**fault, "t": 2.0}, {**fault, "t": 2.0}]
    path.write_text("".join(line + "\n" for line in (*lines, *map(json.dumps, legal))))
    count = len(lines) + len(legal)
    assert len(read_log(path, max_lines=count).runs) == MAX_OF_KIND["run"]
    with pytest.raises(MeasurementError, match=f"more than {count - 1} lines"):
        read_log(path, max_lines=count - 1)


def test_a_cut_last_line_of_deep_lists_is_left_out_too(log, tmp_path):
    write_log(path := tmp_path / "run.jsonl", log)
    with path.open("a", encoding="utf-8") as cut:
        cut.write("[" * 100_000)
    assert "incomplete" in read_log(path).warnings[-1]


def test_a_killed_measurement_leaves_its_windows(log, tmp_path):
    file = LogFile(tmp_path / "run.jsonl")
    short = replace(log, runs=log.runs[:3], idles=log.idles[:1])
    file.keep(short)
    partial = tmp_path / "run.jsonl.partial"
    with partial.open("a", encoding="utf-8") as cut:
        cut.write('{"kind": "sample", "t": 1')
    kept = read_log(partial)
    assert len(kept.runs) == 3
    assert "incomplete" in kept.warnings[-1]
    file.keep(log)
    with file:
        pass
    assert not partial.exists()


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    machine = SimulatedMachine()
    work, calls = machine.workload(12.0), []

    def interrupted():
        calls.append(1)
        if len(calls) > 40:
            raise KeyboardInterrupt
        return work()

    path = tmp_path / "run.jsonl"
    with pytest.raises(KeyboardInterrupt), LogFile(path) as file:
        run_protocol(machine, {"plain": interrupted}, keep=lambda log: file.keep(log, machine.recorder.raw))
    kept = read_log(path)
    assert len(kept.runs) >= 2
    report = make_report(kept)
    assert report.variants[0].joules_per_output_token.value == pytest.approx(12 * 2 / 50, rel=1e-3)
    assert "measured once" in report.warnings[-1]


def test_a_charger_in_the_middle_costs_only_what_it_spoils():
    machine = SimulatedMachine()
    work, calls = machine.workload(12.0), []

    def until_plugged():
        calls.append(1)
        machine.broken = len(calls) > 50
        return work()

    log = run_protocol(machine, {"plain": until_plugged}, Plan(repeats=10, rest_s=3.0, warm_ups=1))
    report = make_report(log)
    (plain,) = report.variants
    assert plain.n >= 4
    assert len(plain.refused) == 1
    assert plain.joules_per_output_token.value == pytest.approx(12 * 2 / 50, rel=1e-3)
    assert any(f"stopped after {plain.n + 1} of 10 repeats: the charger" in text for text in report.warnings)


def test_an_idle_window_without_readings_is_left_out(log):
    report = make_report(replace(log, idles=[log.idles[0], (1e6, 1e6 + 30)]))
    assert report.idle.windows == 1
    assert report.variants[0].n == 5
