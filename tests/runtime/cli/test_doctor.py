"""edge-run doctor: what it says of a machine with everything, with nothing, and with a backend that dies."""

from __future__ import annotations

import io
import json
import os
import sys
import tomllib
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from edge_devices.files.user_cache import CACHE_VARIABLE
from edge_devices.machine.system import System
from edge_devices.remote.snapshot import RecordedSystem
from edge_runtime.backends.llama import crash_probe as probe
from edge_runtime.backends.selection import ask_backend
from edge_runtime.cli import doctor
from edge_runtime.cli.doctor import Diagnosis, diagnose
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


Makes = Callable[..., Diagnosis]


@pytest.fixture
def diagnosis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Makes:
    """Looks at a recorded machine; `answers` names the backends that are installed, and `missing` the extras that are not."""

    def make(*, fixture: str = "rapl-denied", missing: Collection[str] = (), **answers: dict[str, Any]) -> Diagnosis:
        site = tmp_path / f"site-{len(list(tmp_path.iterdir()))}"
        needed = {extra: f"needed-by-{extra}" for extra in doctor.EXTRAS} | {kind: doctor.CARDS[kind].package for kind in answers}
        packages = {"edge-mtp": [f"Requires-Dist: {name}>=1; extra == '{extra}'" for extra, name in needed.items()]}
        packages |= {needed[extra]: [] for extra in {*doctor.EXTRAS} - {*missing}}
        for name, lines in packages.items():
            metadata = site / f"{name.replace('-', '_')}-9.9.dist-info" / "METADATA"
            metadata.parent.mkdir(parents=True)
            metadata.write_text("\n".join(["Metadata-Version: 2.1", f"Name: {name}", "Version: 9.9", *lines]) + "\n")
        monkeypatch.syspath_prepend(site)
        monkeypatch.setattr(doctor, "find_spec", lambda name: name if name in [doctor.CARDS[kind].library for kind in answers] else None)
        return diagnose(RecordedSystem(read_recording(FIXTURES / f"{fixture}.json")), lambda kind: answers[kind])

    return make


def screen(actual: Diagnosis, width: int = 500) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(doctor.diagnosis_table(actual))
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def test_a_machine_with_both_backends_is_ready(diagnosis):
    actual = diagnosis(llama=LLAMA, onnx=ONNX)
    text = screen(actual)
    assert actual.ready
    assert "llama-cpp-python 0.3.36 with the MTP interface; built for AVX2 REPACK\n" in text
    assert "not yet tested with a model" in text
    assert "onnxruntime 1.31.1; devices: cpu, openvino:GPU" in text


@pytest.mark.skipif(os.name != "posix", reason="looks for cmake without a suffix")
def test_without_a_backend_nothing_runs_and_the_line_to_install_it_is_there(diagnosis, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cmake").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    actual = diagnosis(missing={*doctor.EXTRAS})
    text = screen(actual)
    assert not actual.ready
    assert "installing it compiles llama.cpp, which needs a C++ compiler first" in text
    assert "onnxruntime is not installed" in text
    install = "edge-mtp[llama,onnx,grammar,serve,media,export,package,sign,fleet,verify,optimum,report]"
    assert actual.install == f"{sys.executable} -m pip install '{install}'"
    assert "missing: needed-by-grammar>=1" in text


@pytest.mark.parametrize("missing", [["serve"], ["export"]])
def test_what_is_missing_alone_is_named_alone(diagnosis, missing):
    actual = diagnosis(missing=missing, llama=LLAMA)
    assert [extra.name for extra in actual.extras if extra.missing] == missing
    assert actual.install.endswith(f"-m pip install 'edge-mtp[{missing[0]}]'")
    assert {name: state for name, state, _ in doctor.rows(actual)}["export-onnx"] == "ok"


def test_a_denied_meter_comes_with_its_remedy_and_a_usable_one_with_its_scope(diagnosis):
    row = next(row for row in doctor.rows(diagnosis()) if row[1] == "denied")
    assert "rapl" in row[2]
    assert "; " in row[2]
    actual = diagnosis(fixture="rapl-laptop")
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
def test_a_library_that_fails_when_loaded_is_broken(diagnosis, script, sentence):
    answer = ask_backend("llama", [sys.executable, "-c", script], timeout_seconds=1.0 if "sleep" in script else 30.0)
    actual = diagnosis(llama=answer)
    assert not actual.ready
    row = next(row for row in doctor.rows(actual) if row[0] == "llama.cpp")
    assert row[1] == "broken"
    assert row[2].startswith(sentence)


def test_a_crashing_library_has_another_build_as_workaround(diagnosis):
    actual = diagnosis(llama={"error": "its library died of SIGILL when it was loaded"})
    assert 'CMAKE_ARGS="-DGGML_NATIVE=OFF' in screen(actual, width=2000)


def test_probes_of_this_machine_are_shown(diagnosis, monkeypatch, cache):
    pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    for quantizations, answer in ((["Q4_0", "Q8_0"], True), (["Q4_K_M", "Q8_0"], False)):
        kept = probe.ProbeAnswer(
            quantizations=tuple(quantizations), types=tuple(quantizations), use_extra_bufts=answer, reason="", late=False
        )
        probe.PROBES.keep(probe.machine_key(quantizations), kept, print)
    probe.PROBES.keep("of another machine", replace(kept, quantizations=("F16",)), print)
    text = screen(diagnosis(llama=ask_backend("llama")))
    assert "tested with Q4_0+Q8_0: works with all kernels; tested with Q4_K_M+Q8_0: works only without weight repacking" in text
    assert "F16:" not in text
    assert f"{cache} (${CACHE_VARIABLE}): measured.json: 3 entries " in text


@pytest.mark.skipif(os.name != "posix", reason="Windows has no owners in this form")
def test_a_cache_that_is_not_used_is_named(diagnosis, cache):
    cache.mkdir()
    for name, mode in (("measured.json", 0o666), ("checked.json", 0o600)):
        (cache / name).write_text("{}")
        (cache / name).chmod(mode)
    actual = diagnosis()
    assert actual.to_json()["cache"]["refused"] == ["measured.json"]
    (row,) = [row for row in doctor.rows(actual) if row[:2] == ("cache", "denied")]
    assert row[2].startswith("measured.json: it belongs to another user or others may write it, so it is not used; remove it, or set")


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_the_command_needs_no_bundle_and_fits_on_a_screen(command, diagnosis, monkeypatch, words):
    pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    diagnosis(missing=["serve"], onnx=ONNX)  # the packages alone: the backend answers for itself
    result = command("doctor", *words, env={"COLUMNS": "100"})
    assert result.exit_code == 0
    if words:
        record = json.loads(result.stdout)
        assert (record["ready"], record["backends"]["llama"], record["backends"]["onnx"]["devices"][0]["name"]) == (True, None, "cpu")
        assert {extra["name"] for extra in record["extras"]} == {*doctor.EXTRAS}
    else:
        assert result.stdout.startswith("Bundles can run here")
        assert len(result.stdout.splitlines()) <= 36


def test_a_package_that_is_not_installed_is_one_sentence(command, monkeypatch):
    monkeypatch.setattr("sys.path", [])
    result = command("doctor")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: edge-mtp is not installed for ")


def test_every_extra_for_users_is_looked_at():
    assert set(doctor.EXTRAS) == set(EXTRAS) - {"train", "test", "dev", "docs"}


def test_looking_changes_nothing(cache):
    diagnose(System(), lambda _: {"error": "not asked"})
    assert not cache.exists()
