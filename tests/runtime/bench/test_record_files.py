"""Results of several machines in one table: each is checked, joules of two scopes share none, and what strangers send names nobody."""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench_records import BASELINE, fixed, header, run, whole_benchmark
from device_runs import bench, ran
from edge_bench.devices import results
from edge_bench.devices.results import DeviceResult, comparison_tables
from edge_bench.measure.energy import measure_energy
from edge_bench.measure.records import Header, ModelFile, Note, Record, collect, line_of, read_records
from edge_bench.measure.request import shipped_prompts
from edge_bench.report.figures import figures
from edge_devices.energy.intervals import of_error
from edge_devices.energy.report import EnergyReport, VariantEnergy
from edge_devices.energy.run_log import read_log, write_log
from edge_devices.machine.processors import MachineLoad
from edge_devices.meters.base import Scope
from edge_runtime.bundle.bundle import open_bundle
from simulated_session import SimulatedMachine, two_variants

FILES = (ModelFile(role="target", format="gguf", quantization="q4_0", bytes=5_000_000, sha256="ab" * 32),)
DRAFTS = {"drafted_at": (5, 5), "accepted_at": (4, 1)}


def benchmark(name: str, *, slow: float = 1.0, **changes: object) -> list[Record]:
    """Records in which drafts are twice as fast; `name` is the machine's and the run's."""
    machine = {"model": f"Board {name}", "processor": f"processor {name}", "usable_processors": 4}
    runs = [
        run(variant, domain=domain, repeat=repeat, seconds=(slow + repeat / 100) * seconds, **counts)
        for domain in ("code", "prose")
        for repeat in range(3)
        for variant, seconds, counts in ((BASELINE, 2, {}), (fixed(3), 1, DRAFTS))
    ]
    return [header(files=FILES, machine=machine, run=name, **changes), *runs]


def written(path: Path, records: Sequence[Record]) -> Path:
    path.write_text("".join(map(line_of, records)))
    return path


def energy_log(path: Path, name: str, processor: str = "") -> Path:
    log = two_variants(drafted="dense 3")
    log.environment |= {"run": name, "processor": processor or f"processor {name}"}
    write_log(path, log)
    return path


def test_records_of_two_machines_share_a_table_with_their_joules(tmp_path):
    files = [written(tmp_path / "a.jsonl", benchmark("A")), written(tmp_path / "b.jsonl", benchmark("B", slow=3.0))]
    result = ran("report", *files, energy_log(tmp_path / "a-energy.jsonl", "A"))
    for words in ("Board A", "Board B", "a.jsonl", "2.00 [2.00, 2.00]", "Joules per output token, scope package", "0.28 (dense 3)"):
        assert words in result.stdout
    assert "left out" not in result.stderr
    figures = json.loads(bench("report", *files, "--json", "-").stdout)
    assert [each["device"] for each in figures["devices"]] == ["Board A", "Board B"]


def test_files_of_equal_weights_are_seen(tmp_path):
    other = (replace(FILES[0], sha256="cd" * 32),)
    files = [written(tmp_path / f"{n}.jsonl", benchmark(n, slow=slow)) for n, slow in (("A", 1.0), ("B", 2.0))]
    files.append(written(tmp_path / "c.jsonl", [replace(benchmark("C", slow=4.0)[0], files=other), *benchmark("C", slow=4.0)[1:]]))
    bundles = [read_records(file).header.weights for file in files]
    assert bundles[0] == bundles[1] != bundles[2]
    shown = bench("report", *files).stdout
    assert shown.count(f"made-up {bundles[0]}") == 4
    assert shown.count(f"made-up {bundles[2]}") == 2


BUSY = MachineLoad(others=0.9, seconds=1.0)


@pytest.mark.parametrize(
    ("change", "claim", "words"),
    [
        (lambda records: [replace(records[0], planned=99), *records[1:]], "incomplete", "incomplete: 12 of 99 measurements"),
        (lambda records: [records[0], *(replace(each, load=BUSY) for each in records[1:])], "disturbed", "busy for 100% of the time"),
        (lambda records: [*records, Note(text="stopped by Ctrl-C before the end")], "faster", "stopped by Ctrl-C"),
    ],
)
def test_doubtful_records_are_shown_and_claim_nothing(tmp_path, change, claim, words):
    good = written(tmp_path / "good.jsonl", benchmark("A"))
    doubtful = written(tmp_path / "doubtful.jsonl", change(benchmark("B", slow=2.0)))
    result = ran("report", good, doubtful)
    (row,) = [line for line in result.stdout.splitlines() if "Board B" in line and "dense 3" in line]
    assert f"│ {claim}" in row.replace("  ", "")
    assert words in result.stdout


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}\n", "line 1 is not a valid record"),
        ("", "is empty"),
        ("".join(map(line_of, benchmark("A"))), "the same measurement is in "),
        ("".join(map(line_of, [*benchmark("B", slow=2.0), *benchmark("B", slow=2.0)[1:2] * 5000])), "more than 5000 runs"),
        (line_of(header()) + "\n" * 20_000, "more than 10000 lines"),
        ("x" * (results.MAX_RECORD_BYTES + 1), "has more than 64 MiB"),
    ],
)
def test_what_is_no_record_is_left_out_and_named(tmp_path, content, words):
    good = written(tmp_path / "good.jsonl", benchmark("A"))
    (tmp_path / "bad.jsonl").write_text(content)
    result = ran("report", good, tmp_path / "bad.jsonl")
    assert "Board A" in result.stdout
    assert f"left out: {tmp_path / 'bad.jsonl'}" in result.stderr
    assert words in result.stderr


def test_the_same_measurement_counts_once_whatever_else_it_says(tmp_path):
    first, second = benchmark("A"), [replace(benchmark("B")[0], bundle="another", run="other"), *benchmark("A")[1:]]
    result = bench("report", written(tmp_path / "a.jsonl", first), written(tmp_path / "b.jsonl", second))
    assert f"left out: {tmp_path / 'b.jsonl'}: the same measurement is in {tmp_path / 'a.jsonl'}" in result.stderr
    assert "another" not in result.stdout


@pytest.mark.parametrize(
    ("name", "processor", "words"),
    [
        ("C", "", "its run is none of the files of --runs here"),
        ("A", "abacus", "it is of another machine than "),
        ("", "", "its run is none"),
    ],
)
def test_joules_of_another_run_or_machine_are_left_out(tmp_path, name, processor, words):
    files = [written(tmp_path / f"{n}.jsonl", benchmark(n, slow=slow)) for n, slow in (("A", 1.0), ("B", 2.0))]
    result = bench("report", *files, energy_log(tmp_path / "energy.jsonl", name, processor))
    assert words in result.stderr
    assert "Joules" not in result.stdout


def test_a_log_of_another_run_beside_a_single_record_is_noted(tmp_path):
    record, log = written(tmp_path / "a.jsonl", benchmark("A")), energy_log(tmp_path / "e.jsonl", "B")
    assert f"the joules are of another run: {log}" in bench("report", record, "--energy", log).stdout
    same = energy_log(tmp_path / "same.jsonl", "A")
    assert "another run" not in bench("report", record, "--energy", same).stdout


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_among_files_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    result = bench("report", written(tmp_path / "a.jsonl", benchmark("A")), tmp_path / "pipe.jsonl")
    assert "pipe.jsonl is not a regular file" in result.stderr
    assert "Board A" in result.stdout


@pytest.mark.parametrize("words", [("--energy", "x"), ("--external", "x"), ("--markdown", "x"), ("--trace", "x")])
def test_what_a_single_file_has_alone_is_refused_for_several(words, tmp_path):
    assert bench("report", "a.jsonl", "b.jsonl", *words).exit_code == 2


def test_what_a_record_says_does_not_move_the_terminal(tmp_path):
    hostile = [replace(benchmark("B", slow=2.0)[0], bundle="\x1b[2Jgone"), *benchmark("B", slow=2.0)[1:]]
    result = bench("report", written(tmp_path / "a.jsonl", benchmark("A")), written(tmp_path / "b.jsonl", hostile))
    assert "gone" in result.stdout
    assert "\x1b" not in result.stdout


def test_half_of_a_character_in_a_record_ends_no_json(tmp_path):
    """One stranger's record ended --json in a traceback, with the figures of all others."""
    hostile = [replace(benchmark("B", slow=2.0)[0], bundle="half \ud800"), *benchmark("B", slow=2.0)[1:]]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(json.loads(line_of(each))) + "\n" for each in hostile))
    result = ran("report", written(tmp_path / "a.jsonl", benchmark("A")), tmp_path / "b.jsonl", "--json", "-")
    assert json.loads(result.stdout)["devices"][1]["figures"]["header"]["bundle"] == "half ?"


def test_a_real_record_holds_hashes_and_nothing_about_its_owner(exported_pair: Path, probe_memory: None, tmp_path: Path, played) -> None:
    """All that is shipped as prompts, and what names this machine and its user, is looked for in what a stranger would send."""
    machine = SimulatedMachine()

    def joules(_bundle, _request, _load, path, _meter, _minutes, name):  # the command's own log, of a simulated meter
        return measure_energy(path, machine, {"plain": machine.workload(12.0)}, threads=1, system=machine.system, repeats=2, run=name)

    played.meter(machine, joules)
    what = "--domains code,chat --drafters dense --lengths none --policies profit --contexts none --repeats 1 --warm-up 0 --max-tokens 8"
    where = "--runs", tmp_path / "runs.jsonl", "--energy", tmp_path / "energy.jsonl"
    ran("run", exported_pair, *what.split(), "--backend", "llama", "--threads", "1", *where)
    first = read_records(tmp_path / "runs.jsonl").header
    assert {file.sha256 for file in first.files} == {file.sha256 for file in open_bundle(exported_pair).manifest.files}
    assert read_log(tmp_path / "energy.jsonl").environment["run"] == first.run
    held = (tmp_path / "runs.jsonl").read_text() + (tmp_path / "energy.jsonl").read_text()
    for prompt in shipped_prompts(("code", "chat"), 1):
        assert prompt.text[:12] not in held
    for private in (str(exported_pair.parent), str(tmp_path), *names_and_numbers()):
        assert private not in held


def names_and_numbers() -> list[str]:
    """What tells this machine and its user from others, where it is long enough to be no part of another word."""
    places = ("/sys/class/dmi/id/product_serial", "/sys/class/dmi/id/board_serial", "/sys/class/dmi/id/product_uuid", "/etc/machine-id")
    texts = [Path(place).read_text().strip() for place in places if os.access(place, os.R_OK)]
    return [text for text in (*texts, socket.gethostname(), getpass.getuser(), str(Path.home())) if len(text) > 5]


def test_an_older_record_has_no_hashes(tmp_path):
    data: Callable[[Record], dict[str, object]] = lambda record: json.loads(line_of(record))  # noqa: E731
    first = data(benchmark("A")[0])
    for each in first["files"]:
        del each["sha256"]
    del first["run"]
    lines = [first, *map(data, benchmark("A")[1:])]
    (tmp_path / "old.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    old: Header = read_records(tmp_path / "old.jsonl").header
    assert (old.weights, old.run) == ("", "")


def result(device: str, scope: Scope | None = None, *, estimate: bool = False, joules: float = 1.0) -> DeviceResult:
    energy = None
    if scope is not None:
        variant = VariantEnergy(name="plain", n=5, refused=[], joules_per_output_token=of_error(joules, 0.01, 4, 5))
        energy = EnergyReport(
            meter=f"meter of {device}",
            scope=scope,
            estimate=estimate,
            refresh_s=1.0,
            systematic="",
            idle=None,
            variants=[variant],
            warnings=[],
            phase_watts={},
        )
    return DeviceResult(device=device, run="one", figures=figures(collect(whole_benchmark()), energy), happenings=("it got hot",))


def test_scopes_are_never_mixed() -> None:
    results = [
        result("phone", Scope.DEVICE),
        result("other phone", Scope.DEVICE),
        result("laptop", Scope.PACKAGE),
        result("pi", Scope.BOARD),
        result("guess", Scope.DEVICE, estimate=True),
        result("nothing"),
    ]
    tables = {table.name: table for table in comparison_tables(results)}
    energy = {name: [row[0] for row in table.rows] for name, table in tables.items() if name.startswith("energy")}
    assert energy == {
        f"energy-{Scope.DEVICE}": ["phone", "other phone"],
        f"energy-{Scope.PACKAGE}": ["laptop"],
        f"energy-{Scope.BOARD}": ["pi"],
        f"energy-{Scope.DEVICE}-estimate": ["guess"],
    }
    assert "ESTIMATE" in tables[f"energy-{Scope.DEVICE}-estimate"].title
    assert len(tables["devices"].rows) == 6 * 6
    assert "joule" not in tables["devices"].title + " ".join(tables["devices"].columns).lower()
    assert [row[2] for row in tables["happened"].rows][:2] == ["it got hot", "something was left out"]


def test_parquet_keeps_scopes_apart_and_replaces_a_run(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs edge-mtp[fleet]")
    from edge_bench.devices.parquet import fleet_tables, write_parquet

    for item in (result("phone", Scope.DEVICE, joules=2.0), result("laptop", Scope.PACKAGE), result("phone", Scope.DEVICE, joules=4.0)):
        write_parquet(tmp_path, item)
    write_parquet(tmp_path, replace(result("phone", Scope.DEVICE, joules=6.0), run="two"))
    tables = {table.name: table for table in fleet_tables(tmp_path)}
    assert tables[f"fleet-energy-{Scope.DEVICE}"].rows == (("phone", "", "plain", "meter of phone", "2", "5"),)
    assert tables[f"fleet-energy-{Scope.PACKAGE}"].rows == (("laptop", "", "plain", "meter of laptop", "1", "1"),)
    plain = next(row for row in tables["fleet"].rows if row[0] == "phone" and row[3] == "plain")
    assert plain[4] == "2"
    runs = [run for run in collect(whole_benchmark()).runs if run.variant.label == "plain" and run.part == "domains"]
    assert float(plain[5]) == pytest.approx(sum(r.tokens for r in runs) / sum(r.seconds for r in runs), abs=0.06)
