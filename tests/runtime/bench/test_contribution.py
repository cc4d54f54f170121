"""Records of joules per token: made, checked, signed, pooled; and refused where anything does not follow from the readings."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import Result

from bench_records import BASELINE, header, run
from device_runs import bench
from edge_bench.cli import contribute as command
from edge_bench.cli.contribute import Contribution, steps
from edge_bench.cli.outputs import Outputs
from edge_bench.contribution import pool
from edge_bench.devices import remote_run
from edge_bench.devices.remote_run import DevicePackage, RemoteRequest
from edge_bench.measure.energy import fitted, planned_seconds
from edge_bench.measure.prompts import shipped_prompts
from edge_bench.measure.records import CostRecord, ModelFile, Note, Record, line_of
from edge_bench.measure.request import BenchRequest, MeterOptions
from edge_bench.measure.variants import OURS, Variant
from edge_devices.energy import protocol
from edge_devices.energy.characteristics import Characteristics
from edge_devices.energy.protocol import Plan
from edge_devices.energy.report import make_report
from edge_devices.energy.run_log import RunLog, read_log, write_log
from edge_devices.machine.load import MachineLoad
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.session.load_options import LoadOptions
from edge_runtime.session.row_equality import RowEquality
from simulated_session import SimulatedMachine, two_variants
from stub_package import stub_package

PROFIT = Variant(side=OURS, drafter="dense", policy="profit", length=None)


def benchmark(bundle: Path, *, slow: float, repeats: int = 3) -> list[Record]:
    """The records of a benchmark of this bundle: drafts are twice as fast."""
    files = tuple(
        ModelFile(role=f.role, format=f.format, quantization=f.quantization, bytes=f.bytes) for f in open_bundle(bundle).manifest.files
    )
    drafts = {"drafted_at": (5, 5), "accepted_at": (4, 1)}
    runs = [
        run(variant, domain=domain, repeat=repeat, seconds=(slow + repeat / 100) * (1 if variant is PROFIT else 2), **counts)
        for domain in ("code", "prose")
        for repeat in range(repeats)
        for variant, counts in ((BASELINE, {}), (PROFIT, drafts))
    ]
    costs = CostRecord(drafter="dense", length=32, verify_seconds=(0.25,) * 7 + (0.5,), draft_step_seconds=0.01)
    return [header(files=files), *runs, costs, RowEquality(compared=14, different=0, largest=0.0)]


@pytest.fixture(scope="module")
def made_before() -> dict[tuple[object, ...], tuple[Result, dict[str, bytes]]]:
    """What the command said and wrote, by its arguments: most tests change a record that another has made."""
    return {}


@pytest.fixture
def contribute(monkeypatch: pytest.MonkeyPatch, exported_pair: Path, made_before):
    """Runs the command with a simulated meter and simulated work."""

    def call(target: Path, *arguments: str | Path, repeats: int = 4, others: float = 0.01, metered: bool = True) -> Result:
        key = target.name, arguments, repeats, others, metered
        if key in made_before and target.parent.is_dir():
            result, files = made_before[key]
            for name, data in files.items():
                (target.parent / name).write_bytes(data)
            return result
        before = {*target.parent.glob("*")}
        machine = SimulatedMachine()
        machine.system.sleep(len(target.name))  # no two recordings are equal

        def simulated(_bundle: Any, _request: Any, _load: Any, path: Path, *_: Any) -> tuple[Any, RunLog]:
            log = two_variants(machine, "dense profit", repeats)
            write_log(path, log)
            return make_report(log), log

        def speeds(bundle: Path, _request: Any, _load: Any, path: Path, *_: Any) -> tuple[list[Record], bool]:
            records = benchmark(bundle, slow=1 + len(target.name) / 7)
            path.write_text("".join(map(line_of, records)))
            return records, False

        monkeypatch.setattr(command, "find_meter", lambda _: (machine, "") if metered else (None, "no energy meter on this machine"))
        monkeypatch.setattr(command, "measure_speeds", speeds)
        monkeypatch.setattr(command, "measure_joules", simulated)
        monkeypatch.setattr(protocol, "LoadWatch", lambda: SimpleNamespace(load=lambda: MachineLoad(others=others, seconds=60.0)))
        result = bench("contribute", exported_pair, target, *arguments)
        made_before[key] = result, {path.name: path.read_bytes() for path in {*target.parent.glob("*")} - before}
        return result

    return call


def test_a_record_is_made_and_pooled(contribute, tmp_path):
    made = contribute(tmp_path / "a.json")
    assert made.exit_code == 0, made.output
    for words in (
        "scope package",
        "1. plug in the charger",
        "wait: this takes about 27 minutes",
        "valid (speeds and joules): send this file\n",
    ):
        assert words in made.stderr
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["files"]
    assert all(len(file["sha256"]) == 64 for file in record["files"])
    assert record["figures"].keys() == {"plain", "dense profit"}
    log = read_log(tmp_path / "a.jsonl")
    assert log.environment["versions"]["python"]
    assert contribute(tmp_path / "bb.json").exit_code == 0
    pooled = bench("pool", tmp_path)
    assert pooled.exit_code == 0, pooled.output
    assert "Joules, scope package" in pooled.stdout
    assert "mean of 2 ×" in pooled.stdout
    assert "Left out" not in pooled.stdout
    figures = json.loads(bench("pool", tmp_path / "a.json", "--json", "-").stdout)
    assert figures["records"][0]["variants"][0]["joules_per_output_token"]["value"] == record["figures"]["plain"][0]
    assert "J/prompt token" in pooled.stdout


def with_runs(path: Path, records: list[Record]) -> Path:
    """Replaces a record's benchmark, with the hash of that."""
    data = "".join(map(line_of, records)).encode()
    return changed(path, runs=base64.b64encode(zlib.compress(data)).decode(), runs_sha256=hashlib.sha256(data).hexdigest())


def test_a_record_without_a_meter_has_speeds_and_no_texts(contribute, tmp_path, exported_pair):
    made = contribute(tmp_path / "a.json", metered=False)
    assert made.exit_code == 0, made.output
    assert "no energy meter on this machine: the record will have speeds, and no joules" in made.stderr
    assert "valid (speeds): send this file" in made.stderr
    record = json.loads((tmp_path / "a.json").read_text())
    assert (record["log"], record["figures"]) == ("", {})
    assert record["sources"]["target"]["files"][0]["sha256"]
    assert record["parity"] == open_bundle(exported_pair).manifest.parity
    pooled = json.loads(bench("pool", tmp_path, "--json", "-").stdout)
    assert pooled["records"] == []
    (speeds,) = pooled["speeds"]
    assert {row["label"]: row["acceptance_by_position"] for row in speeds["figures"]["overall"]} == {
        "plain": [],
        "dense profit": [0.8, 0.2],
    }
    shown = bench("pool", tmp_path).stdout
    for cell in ("2.00 [2.00, 2.00]", "code 50.0%, prose 50.0%", "80% 20%", "6 of 6", "exact", "200.0"):
        assert cell in shown
    assert "Joules" not in shown


def test_a_real_record_holds_no_text(tmp_path, exported_pair, monkeypatch):
    """All that is shipped as prompts, and all that is generated, is looked for in what the file holds."""
    monkeypatch.setattr(command, "find_meter", lambda _: (None, "no meter"))
    what: dict[str, Any] = {"domains": ("code", "chat"), "drafters": ("dense",), "lengths": (), "policies": ("profit",), "contexts": ()}
    request = BenchRequest(**what, repeats=1, warm_up=0, tokens=8)
    Contribution(exported_pair, tmp_path / "a.json", None, request, LoadOptions(backend="llama")).on_this_machine(MeterOptions())
    record = json.loads((tmp_path / "a.json").read_text())
    held = json.dumps(record) + zlib.decompress(base64.b64decode(record["runs"])).decode()
    for prompt in shipped_prompts(("code", "chat"), 1):
        assert prompt.text[:12] not in held
    assert str(exported_pair.parent) not in held
    assert "1 repeats of a prompt count, 3 are needed" in bench("pool", tmp_path / "a.json").stdout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda records: records[1:], "its benchmark is not valid"),
        (lambda records: [replace(records[0], files=()), *records[1:]], "its benchmark is of another bundle"),
        (lambda records: [replace(records[0], planned=99), *records[1:]], "incomplete: 12 of 99 measurements"),
        (lambda records: [*records, Note(text="stopped by Ctrl-C before the end")], "stopped by Ctrl-C"),
        (lambda records: [r for r in records if getattr(r, "variant", None) != BASELINE], "plain decoding or drafts were not measured"),
        (lambda records: [*records, *records[1:2] * 5000], "more than 5000 runs"),
        (lambda records: [r for r in records if getattr(r, "repeat", 0) < 2], "2 repeats of a prompt count, 3 are needed"),
    ],
)
def test_speeds_that_do_not_count(contribute, tmp_path, exported_pair, change, words):
    assert contribute(tmp_path / "a.json", metered=False).exit_code == 0
    shown = bench("pool", with_runs(tmp_path / "a.json", change(benchmark(exported_pair, slow=1.0)))).stdout
    assert words in shown
    assert "Speeds" not in shown


def test_a_pooled_record_has_the_fields_proposed_for_mlperf(contribute, tmp_path):
    assert contribute(tmp_path / "a.json").exit_code == 0
    (record,) = json.loads(bench("pool", tmp_path / "a.json", "--json", "-").stdout)["records"]
    plain = next(each for each in record["mlperf"] if each["variant"] == "plain")
    ours, runs = record["variants"][0], [run for run in read_log(tmp_path / "a.jsonl").runs if run.variant == "plain"]
    assert plain["energy_per_token_joules"]["mean"] == ours["joules_per_output_token"]["value"]
    assert plain["energy_per_token_joules"]["std"] == pytest.approx(2 * ours["joules_per_output_token"]["error"]), "of four repeats"
    assert plain["output_token_count"] == sum(run.emitted_tokens for run in runs)
    assert plain["total_energy_joules"] == pytest.approx(sum(run.seconds for run in runs) * ours["watts"]["value"], rel=0.01)
    assert plain["thermal_stabilization_seconds"] > 0
    assert (plain["batch_size"], plain["scenario"], plain["measurement_method"]) == (1, "singlestream", record["meter"])


def test_equal_records_count_once_and_other_files_are_named(contribute, tmp_path):
    assert contribute(tmp_path / "a.json").exit_code == 0
    shutil.copy(tmp_path / "a.json", tmp_path / "b.json")
    (tmp_path / "c.json").write_text("{}")
    pooled = bench("pool", tmp_path)
    assert "the same measurement is there already" in pooled.stdout
    assert "is no energy record" in pooled.stdout


def with_log(path: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], end: str = "\n") -> None:
    """Replaces a record's log by another one, with the hash of that."""
    log = zlib.decompress(base64.b64decode(json.loads(path.read_text())["log"])).decode()
    lines = change([json.loads(line) for line in log.splitlines()])
    data = "".join(json.dumps(line) + end for line in lines).encode()
    changed(path, log=base64.b64encode(zlib.compress(data)).decode(), log_sha256=hashlib.sha256(data).hexdigest())


def test_a_measurement_counts_once_however_its_log_is_written(contribute, tmp_path):
    assert contribute(tmp_path / "a.json").exit_code == 0
    for name in ("b.json", "c.json"):
        shutil.copy(tmp_path / "a.json", tmp_path / name)
    with_log(tmp_path / "b.json", lambda lines: lines, end="  \n")
    runs = {"kind": "warning", "text": "another text"}
    with_log(tmp_path / "c.json", lambda lines: [*lines, runs])
    assert bench("pool", tmp_path).stdout.count("the same measurement is there already") == 4, "joules and speeds of two files"


def test_a_record_that_is_not_valid_keeps_none_out(contribute, tmp_path):
    assert contribute(tmp_path / "b.json").exit_code == 0
    shutil.copy(tmp_path / "b.json", tmp_path / "a.json")
    with_log(tmp_path / "a.json", lambda lines: [line for line in lines if line["kind"] != "others"])
    pooled = bench("pool", tmp_path).stdout
    assert "how busy the machine was is not in its log" in pooled
    assert "Joules, scope package" in pooled
    assert "b.json: the same measurement" in pooled.replace("\n", " "), "its speeds, which are valid in both"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_a_folder_is_not_waited_for(contribute, tmp_path):
    assert contribute(tmp_path / "a.json").exit_code == 0
    os.mkfifo(tmp_path / "b.json")
    pooled = bench("pool", tmp_path).stdout
    assert "is no file" in pooled
    assert "Joules, scope package" in pooled


def test_too_few_repeats_are_not_pooled(contribute, tmp_path):
    made = contribute(tmp_path / "few.json", repeats=2)
    assert made.exit_code == 0, made.output
    assert "valid (speeds): send this file; what is not valid is named above" in made.stderr
    assert "plain: 2 repeats count, 3 are needed" in made.stdout


def test_a_busy_machine_is_not_pooled(contribute, tmp_path):
    made = contribute(tmp_path / "busy.json", others=0.4)
    assert "busy: other programs used 40% of the processors" in made.stdout
    changed(tmp_path / "busy.json", remarks=[])
    assert "busy: other programs used 40% of the processors" in bench("pool", tmp_path / "busy.json").stdout


def changed(path: Path, **values: Any) -> Path:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return path


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"figures": {"plain": [0.1, 0.1, 0.1], "dense profit": [0.1, 0.1, 0.1]}}, "do not follow from its readings"),
        ({"figures": {}}, "do not follow from its readings"),
        ({"log_sha256": "0" * 64}, "another sha256"),
        ({"log": "????"}, "is no energy record"),
        ({"log": base64.b64encode(zlib.compress(bytes(1 << 20))[:50]).decode()}, "incomplete"),
        ({"schema": 2}, "schema 2"),
        ({"remarks": [5]}, "is no energy record"),
        ({"runs_sha256": "0" * 64}, "another sha256"),
        ({"runs": "????"}, "is no energy record"),
        ({"runs": base64.b64encode(zlib.compress(bytes(1 << 20))[:50]).decode()}, "incomplete"),
        ({"runs": ""}, "neither joules nor speeds"),
        ({"sources": {"target": 5}}, "is no energy record"),
        ({"parity": [1]}, "is no energy record"),
    ],
)
def test_what_is_damaged_or_does_not_follow_from_the_readings_is_refused(contribute, tmp_path, values, words):
    has_log = not values.keys() & {"runs", "runs_sha256", "sources", "parity"}
    assert contribute(tmp_path / "a.json", metered=has_log).exit_code == 0
    shown = bench("pool", changed(tmp_path / "a.json", **values)).stdout
    assert words in shown
    assert ("J/output token" if has_log else "Speeds") not in shown


def test_what_a_record_says_does_not_move_the_terminal(contribute, tmp_path):
    assert contribute(tmp_path / "a.json").exit_code == 0
    assert "\x1b" not in bench("pool", changed(tmp_path / "a.json", bundle="\x1b[2Jgone")).stdout


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_a_signed_record(contribute, tmp_path, monkeypatch):
    pytest.importorskip("cryptography", reason="needs edge-mtp[sign]")
    key, public = tmp_path / "key.pem", tmp_path / "public.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True, capture_output=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True, capture_output=True)
    assert contribute(tmp_path / "a.json", "--sign", key).exit_code == 0
    assert "yes" in bench("pool", tmp_path / "a.json", "--verify-key", public).stdout
    changed(tmp_path / "a.json", created_at="later")
    monkeypatch.setattr(pool, "parsed_record", lambda *_: pytest.fail("strangers' readings were computed with"))
    assert "is not a signature of a.json" in bench("pool", tmp_path / "a.json", "--verify-key", public).stdout
    (tmp_path / "a.json.sig").unlink()
    assert "is not signed" in bench("pool", tmp_path / "a.json", "--verify-key", public).stdout


@pytest.mark.parametrize(
    "arguments",
    [("contribute", "bundle", "a.json", "--energy", "b.jsonl"), ("run", "bundle", "--sign", "key"), ("pool", "nowhere")],
)
def test_contradictions_are_usage_errors(arguments):
    assert bench(*arguments).exit_code == 2


def test_a_place_that_cannot_hold_the_record_is_refused_before_measuring(contribute, tmp_path):
    result = contribute(tmp_path / "missing" / "a.json")
    assert (result.exit_code, "must be a .json file in a folder that exists" in result.stderr) == (1, True)


def test_devices_get_their_own_steps():
    assert "unplug it when asked" in " ".join(steps(None, 27))


def meter_of(refresh_s: float, lag_s: float) -> Characteristics:
    return Characteristics(refresh_s=refresh_s, longest_gap_s=2 * refresh_s, lag_s=lag_s, zero_rate=0.0, read_s=0.01)


@pytest.mark.parametrize(
    ("refresh_s", "lag_s", "repeats", "loops"), [(0.001, 0.0, 5, True), (0.2, 0.0, 5, True), (2.0, 2.0, 3, True), (5.0, 5.0, 3, False)]
)
def test_the_protocol_fits_into_its_minutes(refresh_s, lag_s, repeats, loops):
    workloads = dict.fromkeys(["plain", "profit", "calibrate:prefill", "calibrate:draft", "calibrate:verify", "calibrate:plain"])
    plan, chosen = fitted(Plan(repeats=5), workloads, meter_of(refresh_s, lag_s), 1620)
    assert (plan.repeats, "calibrate:draft" in chosen) == (repeats, loops)
    assert planned_seconds(plan, chosen, meter_of(refresh_s, lag_s)) <= 1620


def test_devices_measure_the_tools_of_their_package(tmp_path, exported_pair):
    package = DevicePackage(folder=tmp_path, platform="android-arm64", files={})
    asked = RemoteRequest(bundle=exported_pair, package=package, name="r", options=("--repeats", "1"), against_package=True)
    command = remote_run._command(cast(Any, None), asked, "/data/x")
    assert command[command.index("--against") + 1] == "llama.cpp=/data/x/package/tools"
    assert command[-1] == "llama.cpp=/data/x/package/tools"


def test_a_phone_makes_a_record(desk, exported_pair, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_run, "POLL_SECONDS", 0.3)
    phone = desk.phone()
    package = stub_package(tmp_path / "package")
    options = ("--package", package, "--adb", phone.serial, "--results", tmp_path / "results")
    made = bench("contribute", exported_pair, tmp_path / "phone.json", *options)
    assert made.exit_code == 0, made.output
    assert "unplug it when asked" in made.stderr
    assert "valid (joules): send this file" in made.stderr
    assert "simulated" in bench("pool", tmp_path / "phone.json").stdout
    phone.close()


def test_half_of_a_character_in_a_record_ends_no_pool(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One stranger's record ended --json in a traceback, with the figures of all others."""
    for place in ("-", str(tmp_path / "pool.json")):
        Outputs(json_path=place).write_json({"speeds": [{"parity": {"a": "\ud800"}}]})
    assert capfd.readouterr().out == (tmp_path / "pool.json").read_text()
    assert json.loads((tmp_path / "pool.json").read_text()) == {"speeds": [{"parity": {"a": "?"}}]}
