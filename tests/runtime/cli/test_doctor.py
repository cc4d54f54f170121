"""edge-run doctor: what it says of a machine with everything, with nothing, and with a backend that dies."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from edge_devices.files.user_cache import CACHE_VARIABLE
from edge_devices.machine.system import System
from edge_devices.remote.snapshot import RecordedSystem
from edge_runtime.backends.installed import ask_backend
from edge_runtime.backends.llama import crash_probe as probe
from edge_runtime.cli import doctor
from edge_runtime.cli.doctor import Diagnosis, diagnose
from edge_runtime.cli.run import main
from recordings import FIXTURES, read_recording

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
LLAMA = {"version": "0.3.36", "system_info": "CPU : AVX2 = 1 | AMX_INT8 = 0 | REPACK = 1 | ", "probes": []} | {
    "row_kernels": "avx2",
    "stock_reason": None,
    "devices": [],
}
CPU = {"name": "cpu", "kind": "cpu", "hardware": "", "driver": "", "software": False}
GPU = {"name": "openvino:GPU", "kind": "gpu", "hardware": "Arc", "driver": "onnxruntime-ep-openvino 1.8.1; xe 6.12", "software": False}
ONNX = {"version": "1.31.1", "devices": [CPU, GPU], "plug_in_failures": {}, "row_kernels": "avx2", "stock_reason": None}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


def diagnosis(monkeypatch: pytest.MonkeyPatch, *, fixture: str = "rapl-denied", **answers: dict[str, Any]) -> Diagnosis:
    """A machine from a recording, on which those backends are installed that `answers` names."""
    requirements = [
        f"{expected}{' and' if ';' in expected else ';'} extra == '{extra}'"
        for extra, all_of_it in EXTRAS.items()
        for expected in all_of_it
    ]
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: requirements)
    monkeypatch.setattr(doctor, "find_spec", lambda name: name if name in [doctor.CARDS[kind].library for kind in answers] else None)
    return diagnose(RecordedSystem(read_recording(FIXTURES / f"{fixture}.json")), lambda kind: answers[kind])


def screen(actual: Diagnosis, width: int = 500) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(doctor.diagnosis_table(actual))
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def test_a_machine_with_both_backends_is_ready(monkeypatch):
    actual = diagnosis(monkeypatch, llama=LLAMA, onnx=ONNX)
    text = screen(actual)
    assert actual.ready
    assert "llama-cpp-python 0.3.36 with the MTP interface; built for AVX2 REPACK\n" in text
    assert "not yet tested with a model" in text
    assert "onnxruntime 1.31.1; devices: cpu, openvino:GPU" in text


def test_without_a_backend_nothing_runs_and_the_line_to_install_it_is_there(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/cmake" if name == "cmake" else None)
    monkeypatch.setattr(doctor.metadata, "version", only(**{"edge-mtp": "9.9"}))
    actual = diagnosis(monkeypatch)
    text = screen(actual)
    assert not actual.ready
    assert "installing it compiles llama.cpp, which needs a C++ compiler first" in text
    assert "onnxruntime is not installed" in text
    assert (
        actual.install
        == f"{sys.executable} -m pip install 'edge-mtp[llama,onnx,grammar,serve,media,export,package,sign,fleet,verify,optimum,report]'"
    )
    assert "missing: llguidance>=1.9,<2" in text


def test_without_llama_cpp_onnx_graphs_can_be_exported_and_the_screen_says_so(monkeypatch):
    names = ("edge-mtp", "gguf", "onnx", "safetensors", "ml_dtypes", "tokenizers", "huggingface_hub")
    there = dict.fromkeys(names, "9.9")
    monkeypatch.setattr(doctor.metadata, "version", only(**there))
    states = {name: state for name, state, _ in doctor.rows(diagnosis(monkeypatch, onnx=ONNX))}
    assert (states["export-onnx"], states["export"]) == ("ok", "missing")


def only(**versions: str):
    def version(name: str) -> str:
        if name not in versions:
            raise doctor.metadata.PackageNotFoundError(name)
        return versions[name]

    return version


def test_one_missing_extra_is_named_alone(monkeypatch):
    real = doctor.metadata.version
    expected = [item for extra in diagnosis(monkeypatch).extras for item in (*extra.installed, *extra.missing)]
    versions = {re.split(r"[^\w.-]", item)[0]: "1.0" for item in expected}
    versions.pop("uvicorn", None)
    monkeypatch.setattr(doctor.metadata, "version", only(**versions | {"edge-mtp": real("edge-mtp")}))
    actual = diagnosis(monkeypatch, llama=LLAMA)
    assert [extra.name for extra in actual.extras if extra.missing] == ["serve"]
    assert actual.install.endswith("-m pip install 'edge-mtp[serve]'")


def test_a_denied_meter_comes_with_its_remedy(monkeypatch):
    row = next(row for row in doctor.rows(diagnosis(monkeypatch)) if row[1] == "denied")
    assert "rapl" in row[2]
    assert "; " in row[2]


def test_a_usable_meter_says_its_scope(monkeypatch):
    actual = diagnosis(monkeypatch, fixture="rapl-laptop")
    assert ("energy meter", "ok") in [row[:2] for row in doctor.rows(actual)]
    assert "scope package" in screen(actual)


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "its library died of SIGILL when it was loaded"),
        ('print(\'{"error": "too old"}\'); raise SystemExit(1)', "too old"),
        ("raise SystemExit(3)", "its library ended with exit code 3 when it was loaded"),
        ("print('nonsense')", "its library gave no answer when it was loaded"),
        ("import time; time.sleep(60)", "its library gave no answer in 1 seconds when it was loaded"),
    ],
    ids=["signal", "sentence", "exit code", "nonsense", "hang"],
)
def test_a_library_that_fails_when_loaded_is_broken(monkeypatch, script, sentence):
    answer = ask_backend("llama", [sys.executable, "-c", script], timeout_seconds=1.0 if "sleep" in script else 30.0)
    actual = diagnosis(monkeypatch, llama=answer)
    assert not actual.ready
    row = next(row for row in doctor.rows(actual) if row[0] == "llama.cpp")
    assert row[1] == "broken"
    assert row[2].startswith(sentence)


def test_a_crashing_library_has_another_build_as_workaround(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.3.36")
    actual = diagnosis(monkeypatch, llama={"error": "its library died of SIGILL when it was loaded"})
    assert 'CMAKE_ARGS="-DGGML_NATIVE=OFF' in screen(actual, width=2000)


def test_probes_of_this_machine_are_shown(monkeypatch, cache):
    pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    for quantizations, answer in ((["Q4_0", "Q8_0"], True), (["Q4_K_M", "Q8_0"], False)):
        kept = probe.ProbeAnswer(
            quantizations=tuple(quantizations), types=tuple(quantizations), use_extra_bufts=answer, reason="", late=False
        )
        probe.PROBES.keep(probe.machine_key(quantizations), kept, print)
    probe.PROBES.keep("of another machine", replace(kept, quantizations=("F16",)), print)
    text = screen(diagnosis(monkeypatch, llama=ask_backend("llama")))
    assert "tested with Q4_0+Q8_0: works with all kernels; tested with Q4_K_M+Q8_0: works only without weight repacking" in text
    assert "F16:" not in text
    assert f"{cache} (${CACHE_VARIABLE}): measured.json: 3 entries " in text


@pytest.mark.skipif(os.name != "posix", reason="Windows has no owners in this form")
def test_a_cache_that_is_not_used_is_named(monkeypatch, cache):
    cache.mkdir()
    for name, mode in (("measured.json", 0o666), ("checked.json", 0o600)):
        (cache / name).write_text("{}")
        (cache / name).chmod(mode)
    actual = diagnosis(monkeypatch)
    assert actual.to_json()["cache"]["refused"] == ["measured.json"]
    (row,) = [row for row in doctor.rows(actual) if row[:2] == ("cache", "denied")]
    assert row[2].startswith("measured.json: it belongs to another user or others may write it, so it is not used; remove it, or set")


def test_onnxruntime_answers_for_itself(monkeypatch):
    pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    answer = ask_backend("onnx")
    assert answer["devices"][0]["name"] == "cpu"


def test_the_command_needs_no_bundle_and_prints_one_object(monkeypatch):
    monkeypatch.setattr(doctor, "diagnose", lambda _: diagnosis(monkeypatch, llama=LLAMA))
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    assert record["ready"] is True
    assert record["backends"] == {"llama": LLAMA, "onnx": None}
    assert {extra["name"] for extra in record["extras"]} == set(doctor.EXTRAS)


def test_the_command_fits_on_a_screen(monkeypatch):
    monkeypatch.setattr(doctor, "diagnose", lambda _: diagnosis(monkeypatch, onnx=ONNX))
    result = CliRunner().invoke(main, ["doctor"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert result.stdout.startswith("Bundles can run here")
    lines = result.stdout.splitlines()
    assert len(lines) <= 35 + sum(" missing  " in line for line in lines)  # which say in a second line what they lack


def test_a_package_that_is_not_installed_is_one_sentence(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "version", only())
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: edge-mtp is not installed for ")


def test_every_extra_for_users_is_looked_at():
    assert set(doctor.EXTRAS) == set(EXTRAS) - {"train", "test", "dev", "docs"}


def test_looking_changes_nothing(cache):
    diagnose(System(), lambda _: {"error": "not asked"})
    assert not cache.exists()
