"""The edge-bench command: a small real benchmark, its files made again from its records, refusals, Ctrl-C."""

from __future__ import annotations

import csv
import itertools
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import Result

from bench_records import whole_benchmark
from device_runs import bench, ran
from edge_bench.measure import benchmark, command
from edge_bench.measure.energy import energy_figures
from edge_bench.measure.records import Header, Note, RecordFile, read_records
from edge_bench.measure.request import BenchRequest
from edge_bench.report.figures import ROWS
from edge_devices.energy.run_log import write_log
from edge_runtime.backends.kernels.loader import variant
from edge_runtime.bundle.bundle import Quality
from edge_runtime.errors import BackendError
from edge_runtime.session.load_options import LoadOptions
from simulated_session import SimulatedMachine, two_variants


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    path = tmp_path / "made-up.jsonl"
    with RecordFile(path) as file:
        for record in whole_benchmark():
            file.add(record)
    return path


@pytest.fixture(scope="module")
def measured(exported_pair: Path, probe_memory: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("bench")
    what = "--domains code,chat --lengths 3 --policies stepped --drafters dense,lookup --repeats 2 --max-tokens 12 --contexts 32,4000"
    how = "--concurrency 1,2 --kv-types q8_0 --threads 1 --check none"
    files = "--runs", folder / "run.jsonl", "--json", folder / "figures.json"
    result = bench("run", exported_pair, *what.split(), *how.split(), *files)
    return result, folder


def test_a_real_pair_is_measured_in_all_respects(measured):
    result, folder = measured
    assert result.exit_code == 0, result.output
    for words in ("All domains", "dense 3", "lookup stepped", "Time of a step", "Concurrent requests", "KV cache types", "peak, dense"):
        assert words in result.stdout
    assert "a text of 4000 tokens is left out" in result.stdout
    records = read_records(folder / "run.jsonl")
    assert records.header.machine["usable_processors"] >= 1
    assert records.header.row_kernels in (variant(), "none")  # without repacked weights llama.cpp's own multiply
    runs = [run for run in records.runs if run.part == "domains"]
    assert len(runs) == 2 * 2 * 5
    assert {run.domain for run in records.runs if run.part == "contexts"} == {"32"}
    assert all(run.prompt_tokens == 32 for run in records.runs if run.part == "contexts")
    assert {(m.drafter, m.sequences) for m in records.memory} == {("dense", 1), ("lookup", 1), ("dense", 2)}
    assert all(m.peak_bytes > 20_000_000 for m in records.memory)
    assert [len(curve.verify_seconds) for curve in records.cost_curves] == [13, 13]
    assert [c.clients for c in records.concurrency].count(2) == 4
    assert [cost.kv_type for cost in records.kv_types] == ["f16", "q8_0"]
    assert not [note for note in records.notes if "time of day" in note]


def test_drafts_are_accepted_and_outputs_are_plain_decodings(measured):
    figures = json.loads((measured[1] / "figures.json").read_text())
    rows = {row["label"]: row for row in figures["overall"]}
    assert rows["plain"]["acceptance_rate"] is None
    assert rows["dense 3"]["acceptance_rate"] > 0.2
    assert rows["dense 3"]["equal"] == rows["dense 3"]["compared"] == 4
    assert all(level["equal"] == level["compared"] for level in figures["concurrency"])


def test_figures_made_again_are_the_same(measured, tmp_path):
    _, folder = measured
    again = ran("report", folder / "run.jsonl", "--json", "-")
    assert json.loads(again.stdout) == json.loads((folder / "figures.json").read_text())


def test_a_report_becomes_tables_and_a_page(made_up, tmp_path):
    pytest.importorskip("matplotlib", reason="needs edge-mtp[report]")
    result = ran("report", made_up, "--html", tmp_path / "report.html", "--json", tmp_path / "figures.json")
    assert "dense 2" in result.stdout
    assert "1.50 [" in result.stdout
    assert (tmp_path / "report.html").read_text().count("<svg") == 6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["figures.json", "made-up.jsonl", "report.html"]


def test_a_table_has_the_figures_of_the_json(made_up, tmp_path):
    ran("report", made_up, "--csv", tmp_path / "rows.csv", "--json", tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    lines = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert [line["part"] for line in lines] == [part for part in ROWS for _ in figures[part]]
    drafted = next(line for line in lines if line["label"] == "dense 2")
    row = next(row for row in figures["overall"] if row["label"] == "dense 2")
    assert float(drafted["speed_up.low"]) == row["speed_up"]["low"]
    assert float(drafted["acceptance_by_position.2"]) == row["acceptance_by_position"][1]
    assert lines[0]["speed_up.value"] == ""


def test_records_without_rounds_have_no_trace(made_up, tmp_path):
    result = bench("report", made_up, "--trace", tmp_path / "trace.jsonl")
    assert result.exit_code == 1
    assert "these records hold no steps" in result.stderr
    assert not (tmp_path / "trace.jsonl").exists()


def test_a_table_of_devices_names_them_in_each_line(made_up, tmp_path):
    folder = tmp_path / "results" / "one" / "phone"
    folder.mkdir(parents=True)
    made_up.rename(folder / "runs.jsonl")
    result = ran("compare", tmp_path / "results", "--csv", tmp_path / "rows.csv")
    lines = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert {(line["device"], line["run"]) for line in lines} == {("phone", "one")}
    assert {line["part"] for line in lines} == set(ROWS)
    assert "First token by prompt length" in result.stdout


class Devices:
    """Benchmarks that were measured before, one for each device; `ends` has what a device raises."""

    def __init__(self) -> None:
        self.opened: list[str | None] = []
        self.ends: dict[str | None, BaseException] = {}

    def __call__(self, _bundle: Path, _request: BenchRequest, load: LoadOptions) -> SimpleNamespace:
        self.opened.append(load.device)
        if load.device in self.ends:
            raise self.ends[load.device]
        return SimpleNamespace(records=whole_benchmark)


@pytest.fixture
def devices(played) -> Devices:
    devices = Devices()
    played.benchmark(devices)
    played.any_device()
    return devices


def test_devices_of_one_machine_are_measured_one_after_the_other_into_one_table(devices, exported_pair, tmp_path):
    result = ran("run", exported_pair, "--devices", "cpu, openvino:GPU", "--runs", tmp_path / "runs", "--json", tmp_path / "all.json")
    assert devices.opened == ["cpu", "openvino:GPU"]
    assert [each["device"] for each in json.loads((tmp_path / "all.json").read_text())["devices"]] == devices.opened
    assert "First token by prompt length" in result.stdout
    again = bench("compare", tmp_path / "runs")
    assert "openvino-GPU" in again.stdout
    assert all(len(read_records(tmp_path / "runs" / name / "runs.jsonl").runs) for name in ("cpu", "openvino-GPU"))


@pytest.mark.parametrize(("failure", "code"), [(BackendError("it is wrong"), 1), (KeyboardInterrupt(), 130)])
def test_what_was_measured_before_a_device_failed_is_written(devices, exported_pair, tmp_path, failure, code):
    devices.ends["gpu"] = failure
    result = bench("run", exported_pair, "--devices", "cpu,gpu,npu", "--json", tmp_path / "all.json")
    assert result.exit_code == code, result.output
    assert devices.opened == ["cpu", "gpu"]
    assert str(failure) in result.stderr
    assert [each["device"] for each in json.loads((tmp_path / "all.json").read_text())["devices"]] == ["cpu"]


def test_a_missing_device_is_refused_before_any_is_measured(played, exported_pair):
    devices = Devices()
    played.benchmark(devices)
    result = bench("run", exported_pair, "--devices", "cpu,abacus")
    assert (result.exit_code, "abacus" in result.stderr, devices.opened) == (1, True, [])


def test_energy_comes_from_its_log(made_up, tmp_path):
    write_log(tmp_path / "energy.jsonl", two_variants())
    result = ran("report", made_up, "--energy", tmp_path / "energy.jsonl")
    assert "saves energy" in result.stdout
    assert "scope package" in result.stdout
    result = bench("report", made_up, "--energy", made_up)
    assert result.exit_code == 1
    assert "line 1 is not a line of a run log" in result.stderr


def test_a_log_of_speeds_is_no_recording_of_a_meter(made_up):
    result = bench("run", "bundle", "--energy", "x.jsonl", "--meter", f"replay:{made_up}")
    assert result.exit_code == 1
    assert "holds no readings of a meter; give the file that edge-bench run --energy wrote" in result.stderr
    assert "KeyError" not in result.stderr


def test_speeds_are_shown_before_joules_are_measured(played, devices, exported_pair, tmp_path):
    """Minutes pass in between, which nobody should wait for the first table."""

    def joules(*_):
        click.echo("HERE JOULES ARE MEASURED")
        log = two_variants()
        return energy_figures(log), log

    played.meter(SimulatedMachine(), joules)
    arguments = "run", exported_pair, "--energy", tmp_path / "energy.jsonl", "--minutes", "1"
    result = ran(*arguments, "--json", tmp_path / "figures.json")
    before, after = result.stdout.split("HERE JOULES ARE MEASURED")
    assert "All domains" in before
    assert "Joules per output token" not in before
    assert "Joules per output token" in after
    assert "All domains" not in after, "once is enough"
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["energy"]["variants"]
    assert figures["overall"]
    as_json = bench(*arguments, "--json", "-").stdout.replace("HERE JOULES ARE MEASURED", "")
    assert json.loads(as_json)["energy"]


def test_without_a_meter_energy_is_refused_before_the_bundle_is_opened(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "find_meter", lambda _: (None, "no energy meter on this machine"))
    result = bench("run", "bundle", "--energy", tmp_path / "energy.jsonl")
    assert result.exit_code == 1
    assert "no energy meter on this machine" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [(KeyboardInterrupt(), 130, "stopped by Ctrl-C"), (BackendError("the computation failed"), 1, "Error: the computation failed")],
)
def test_what_stops_it_is_said_and_the_records_are_kept(played, tmp_path, error, code, words):
    def records():
        yield from whole_benchmark()[:9]
        raise error

    played.benchmark(lambda *_: SimpleNamespace(records=records))
    result = bench("run", "bundle", "--runs", tmp_path / "run.jsonl")
    assert (result.exit_code, words in result.output) == (code, True)
    assert code == 1 or "dense 2" in result.stdout
    kept = read_records(tmp_path / "run.jsonl")
    assert len(kept.runs) == 8
    assert code == 1 or "stopped" in kept.notes[-1]
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run"], 2, "Missing argument 'BUNDLE'"),
        (["bundle"], 2, "no such command 'bundle'"),
        (["report", "missing.jsonl"], 1, "missing.jsonl cannot be read"),
        (["report", "x", "--columns", "time=t"], 2, "--columns is for the table of --external"),
        (["run", "bundle", "--minutes", "10"], 2, "--minutes is for --energy"),
        (["devices", "bundle"], 2, "name devices with --adb"),
        (["run", "bundle", "--against", "vllm=x"], 2, "is not llama.cpp=PATH"),
        (["run", "bundle", "--lengths", "99"], 2, "not all in 1..12"),
        (["run", "bundle", "--policies", "luck"], 2, "policy 'luck' is unknown"),
        (["run", "bundle", "--drafters", "none"], 2, "no drafter"),
        (["run", "bundle", "--drafters", "dense,split,best"], 2, "drafter 'best' is unknown"),
        (["run", "bundle", "--devices", "cpu,gpu", "--trace", "x"], 2, "--trace is for the runs of a single device"),
        (["run", "bundle", "--devices", "cpu,cpu"], 2, "not a list of different devices"),
        (["run", "bundle", "--domains", "none"], 1, "no prompt to measure with"),
        (["run", "bundle", "--domains", "weather"], 2, "domain 'weather' is unknown"),
        (["run", "bundle", "--concurrency", "0"], 2, "numbers of clients '0'"),
        (["run", "bundle", "--kv-types", "q2"], 2, "KV type 'q2' is unknown"),
        (["run", "bundle", "--meter", "sundial"], 1, "no meter 'sundial' on this machine"),
        (["run", "nowhere"], 1, "nowhere is not a bundle"),
    ],
)
def test_refusals_say_what_to_do(arguments, code, words):
    result = bench(*arguments)
    assert result.exit_code == code
    assert words in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.output


def test_two_sets_of_one_name_are_refused(tmp_path):
    (tmp_path / "code.json").write_text('["x"]')
    result = bench("run", "bundle", "--prompts", tmp_path / "code.json")
    assert (result.exit_code, "two sets of prompts named 'code'" in result.stderr) == (1, True)


def test_a_page_is_refused_before_the_bundle_is_opened_where_its_library_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = bench("run", "bundle", "--html", tmp_path / "r.html")
    assert (result.exit_code, "pip install 'edge-mtp[report]'" in result.stderr) == (1, True)


def test_a_report_says_what_the_export_kept_of_the_model(exported_pair, monkeypatch):
    kept = Quality(rows=501, mean_kl=0.14, perplexity=94.0, reference_perplexity=87.0, greedy_agreement=0.81)
    monkeypatch.setattr(benchmark, "exported_quality", lambda _: kept)
    records = benchmark.Benchmark(exported_pair, BenchRequest(drafters=("lookup",)), LoadOptions(check="none")).records()
    assert isinstance(next(records), Header)
    note = next(records)
    assert isinstance(note, Note)
    assert note.text == f"this bundle {kept.words}, as its export measured"


def test_a_jump_of_the_time_of_day_is_noted_and_changes_no_figure(exported_pair, probe_memory, tmp_path, monkeypatch):
    """The time of day goes a day back with each look at it."""
    looks, now = itertools.count(), time.time
    monkeypatch.setattr("time.time", lambda: now() - 86400.0 * next(looks))
    what = "--domains code --lengths 1 --policies stepped --drafters lookup --repeats 1 --max-tokens 4 --contexts 32"
    how = "--threads 1 --check none"
    ran("run", exported_pair, *what.split(), *how.split(), "--runs", tmp_path / "run.jsonl")
    records = read_records(tmp_path / "run.jsonl")
    (note,) = (note for note in records.notes if "time of day" in note)
    assert note.startswith("the time of day moved by -")
    assert all(0 < run.seconds < 100 for run in records.runs)
