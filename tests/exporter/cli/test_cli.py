"""The command: what it prints where, and its exit codes."""

from __future__ import annotations

import io
import json
import shutil
import signal
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="needs edge-mtp[export]")
from click.testing import CliRunner, Result
from rich.console import Console

from edge_devices.errors import byte_text
from edge_export.checkpoint import sources
from edge_export.cli import export
from edge_export.cli.command import main
from edge_export.cli.display import Steps
from edge_export.cli.export import default_output
from edge_export.pipeline import export as pipeline
from edge_runtime.bundle.bundle import open_bundle

QUICK = ["--target-quant", "f16", "--drafter-quant", "f16", "--no-verify"]


def invoke(*arguments: object, command: str = "pair") -> Result:
    return CliRunner().invoke(main, [command, *(str(argument) for argument in arguments)])


def test_json_is_one_object_on_standard_output(pair: list[Path], tmp_path: Path) -> None:
    result = invoke(*pair, "-o", tmp_path / "out", "--json", *QUICK)
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    bundle = open_bundle(printed["bundle"])
    assert printed["files"][0]["sha256"] == bundle.file("target").sha256
    assert "Convert the target to f16" in result.stderr
    assert "Left out of the target: vision_tower" in result.stderr


def test_the_table_names_every_file_with_its_size(pair: list[Path], tmp_path: Path) -> None:
    result = invoke(*pair, "-o", tmp_path / "out", *QUICK)
    assert result.exit_code == 0, result.stderr
    for entry in open_bundle(tmp_path / "out").manifest.files:
        line = next(line for line in result.stdout.splitlines() if entry.path in line)
        assert byte_text(entry.bytes) in line
    assert "Parity not measured: it was switched off with --no-verify." in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        "",
        "one",
        "a b --target-quant q3",
        "a b --context 0",
        "a b --widened",
        "a b --save-imatrix .",
        "a b --tune-minutes 3",
        "a b --calibrate t --imatrix i",
        "a b --calibrate t --no-calibrate",
        "a b --calibrate t --save-imatrix no",
    ],
)
def test_usage_errors_exit_2(words: str, tmp_path: Path) -> None:
    assert invoke(*words.split(), "-o", tmp_path / "out").exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("google/gemma-4-E2B-it", ["-o", "out"], "edge-export pair google/gemma-4-E2B-it DRAFTER --output BUNDLE"),
        ("pair", ["someone/target", "-o", "out"], "give TARGET and DRAFTER"),
        ("pair", ["e2b", "-o", "out"], "name the checkpoint: google/gemma-4-E2B-it"),
        ("plan", ["E2C"], "no drafter of E2C is known here"),
        *(("plan", words, "give a size (E2B, E4B, 12B, 26B-A4B, 31B), or TARGET") for words in ([], ["E2C"])),
    ],
)
def test_what_is_not_enough_gets_the_way_out(command: str, arguments: list[str], words: str) -> None:
    result = invoke(*arguments, command=command)
    assert (result.exit_code, words in result.stderr) == (2, True), result.stderr


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """These packages are not installed."""

    def installed(name: str, known: Callable[[str], str] = version) -> str:
        if name == "llama-cpp-python" and "llama_cpp" in packages:
            raise PackageNotFoundError(name)
        return known(name)

    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("importlib.metadata.version", installed)


def test_nothing_is_fetched_where_a_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "llama_cpp")
    names = ("google/gemma-4-E2B-it", "-o", tmp_path / "out")
    result = invoke(*names, "--format", "gguf")
    assert (result.exit_code, "quantizing needs llama-cpp-python" in result.stderr) == (1, True)
    without(monkeypatch, "onnx")
    result = invoke(*names, "--format", "onnx")
    assert (result.exit_code, "onnx is not installed; pip install" in result.stderr) == (1, True)


def test_the_format_is_what_the_installed_packages_write(pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "llama_cpp")
    result = invoke(*pair, "-o", tmp_path / "out", "--no-verify")
    assert result.exit_code == 0, result.stderr
    assert "For GGUF files: pip install 'edge-mtp[llama,export]'" in result.stderr
    assert list((tmp_path / "out").glob("*.onnx"))
    assert not list((tmp_path / "out").glob("*.gguf"))


def test_refusals_are_one_sentence_and_exit_1(pair: list[Path], tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "empty").mkdir()
    cases = {
        ("/nowhere", pair[1], "-o", tmp_path / "out"): "the target /nowhere does not exist",
        (*pair, "-o", "/nowhere/at/all"): "/nowhere/at is not a folder",
        (pair[0], pair[0], "-o", tmp_path / "out"): "not an MTP assistant",
        (tmp_path / "empty", pair[1], "-o", tmp_path / "out"): "config.json is missing",
        (*pair, "-o", tmp_path / "there"): "exists already",
        (*pair, "-o", tmp_path / "out", "--context", 99999): "context 99999 is not in 1..1024",
    }
    for arguments, words in cases.items():
        result = invoke(*arguments, "--no-verify")
        assert result.exit_code == 1, words
        assert result.stdout == ""
        error = next(line for line in result.stderr.splitlines() if line.startswith("Error: "))
        assert words in error
        assert "Traceback" not in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "there"]


def test_the_reference_pair_stands_for_target_and_drafter(tmp_path: Path) -> None:
    result = invoke("-o", tmp_path / "out", *QUICK, command="reference")
    assert result.exit_code == 0, result.stderr
    manifest = open_bundle(tmp_path / "out").manifest
    assert [manifest.sources[role].origin for role in ("target", "drafter")] == [path.name for path in sources.reference_pair()]
    assert manifest.acceptance == sources.shipped_acceptance(sources.reference_pair()[1]) != {}, "without --verify too"


def test_a_plan_makes_nothing_and_its_sizes_are_those_of_an_export(pair: list[Path], tmp_path: Path) -> None:
    result = invoke(*pair, "--profile", "raspberry-pi-5", "--json", *QUICK[:4], command="plan")
    assert result.exit_code == 0, result.stderr
    planned = json.loads(result.stdout)["plan"]
    assert not (tmp_path / "out").exists()
    assert invoke(*pair, "-o", tmp_path / "out", *QUICK).exit_code == 0
    target = open_bundle(tmp_path / "out").file("target")
    assert planned["memory"]["weights"] == pytest.approx(
        target.bytes + sum(f.bytes for f in open_bundle(tmp_path / "out").manifest.files if f.role in ("drafter", "drafter_head")),
        rel=0.1,
    )


@pytest.mark.parametrize(
    ("target", "output"),
    [
        ("google/gemma-4-E2B-it", "gemma-4-E2B-it"),
        ("google/gemma-4-E2B-it@main", "gemma-4-E2B-it"),
        ("unsloth/gemma-4-E2B-it-GGUF:UD-Q4_K_XL", "gemma-4-E2B-it-GGUF"),
        ("unsloth/x-GGUF@v1:sub/x-Q4_0.gguf", "x-GGUF"),
        ("/models/gemma-4-1.5-it/", "gemma-4-1.5-it"),
        ("../models/x-Q4_0.gguf", "x-Q4_0"),
    ],
)
def test_without_an_output_the_bundle_has_the_targets_name(target: str, output: str) -> None:
    assert default_output(target) == Path(output)


def test_a_checkpoint_here_is_not_taken_for_its_bundle(pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pair[0], "x")
    for words in (["x"], ["./x", "--force"], [str(tmp_path / "x"), "--force"]):
        result = invoke(words[0], pair[1], *words[1:], *QUICK)
        assert (result.exit_code, "Traceback" in result.stderr) == (1, False)
    assert "x exists already; choose another name with --output" in invoke("x", pair[1], *QUICK).stderr
    assert (tmp_path / "x" / "config.json").is_file()


def test_a_long_step_says_how_far_it_is_where_no_bar_is_drawn() -> None:
    with Steps(Console(file=(out := io.StringIO()))) as step:
        report = step("row kernels")
        for share in (0.5, 0.55, 1.0):
            report(share)
    assert out.getvalue().splitlines() == ["row kernels", "row kernels: 50 %", "row kernels: 100 %"]


def test_other_commands_need_what_they_need(pair: list[Path], tmp_path: Path) -> None:
    assert invoke(command="reference").exit_code == 2
    assert invoke(*pair, "-o", tmp_path / "out", "--profile", "apple-m").exit_code == 2
    assert "no device profile 'x'" in invoke(*pair, "--profile", "x", command="plan").stderr


def test_an_option_that_is_given_wins_over_the_device_s(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []
    monkeypatch.setattr(export, "export_pair", lambda request, _: requests.append(request))
    for words in ([], ["--onnx-target", "int4"]):
        invoke("a", "b", "-o", "out", "--format", "both", "--device", "qnn", "--no-verify", *words)
    assert [(request.onnx.target, request.onnx.drafter) for request in requests] == [("f16", "f16"), ("int4", "f16")]
    assert [(request.verify, request.gguf, str(request.output)) for request in requests] == [(False, True, "out")] * 2


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "stopped; nothing unfinished was left behind\n"), (signal.SIGTERM, 143, "")],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_an_export_that_is_stopped_leaves_nothing(
    number: int, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "make_gguf", lambda *_: signal.raise_signal(number))
    result = invoke("-o", tmp_path / "out", *QUICK, command="reference")
    assert (result.exit_code, result.stdout, list(tmp_path.iterdir())) == (code, "", [])
    assert result.stderr.endswith(said)
    assert "Traceback" not in result.stderr


def test_a_publication_that_is_stopped_goes_on_by_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "publication", lambda *_: signal.raise_signal(signal.SIGINT))
    result = invoke(tmp_path, "me/model", command="publish")
    assert (result.exit_code, result.stderr) == (130, "stopped; the same command goes on\n")
