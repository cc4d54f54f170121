"""Nothing of ours calls home: each way in is watched for names, connections and files, and so is onnxruntime by itself, as the control."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from bench_records import ONE_OF_EACH
from edge_devices import SWITCHES
from network_watch import Watched, Watcher

PACKAGES = ("edge_devices", "edge_runtime", "edge_export")
# onnxruntime's uploader sends its first events after about nine seconds.
WAIT_S = 12
RUNTIME = "from edge_runtime.backends.onnx.devices import onnxruntime_module; onnxruntime_module()"


@pytest.fixture(scope="module")
def watcher(tmp_path_factory: pytest.TempPathFactory) -> Watcher:
    return Watcher(tmp_path_factory.mktemp("watch"))


@pytest.fixture(scope="module")
def waiting(watcher: Watcher) -> Iterator[list[Future[Watched]]]:
    """onnxruntime alone and through us, each for as long as its uploader takes; the commands run meanwhile."""
    pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
    with ThreadPoolExecutor(2) as both:
        yield [both.submit(watcher.run, "-c", f"{start}; import time; time.sleep({WAIT_S})") for start in ("import onnxruntime", RUNTIME)]


@pytest.mark.parametrize(("package", "before"), [*((package, "0") for package in PACKAGES), (PACKAGES[0], None), (PACKAGES[0], "")])
def test_importing_a_package_switches_telemetry_off_whatever_was_set(package, before):
    env = {key: value for key, value in os.environ.items() if key not in SWITCHES} | {"PYTHONPATH": os.pathsep.join(sys.path)}
    code = f"import os, {package}; print([os.environ[name] for name in {list(SWITCHES)}])"
    if before is not None:
        env |= dict.fromkeys(SWITCHES, before)
    result = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
    assert result.strip() == str(list(SWITCHES.values()))


def test_the_watch_sees_names_addresses_and_files(watcher):
    code = """
import pathlib, socket
for host in "example.com", "192.0.2.1":
    try:
        socket.create_connection((host, 9), timeout=1)
    except OSError:
        pass
(pathlib.Path.home() / "left").touch()"""
    observed = watcher.run("-c", code)
    assert (observed.network, observed.files) == (["resolve example.com", "resolve 192.0.2.1"], ["left"])


def test_onnxruntime_leaves_a_device_id_by_itself_and_none_through_us(watcher):
    pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
    alone = watcher.run("-c", "import onnxruntime")
    if not any(name.endswith("deviceid") for name in alone.files):
        pytest.skip("this build of onnxruntime has no telemetry")
    assert watcher.run("-c", RUNTIME).files == []
    late = watcher.run("-c", "import edge_runtime, onnxruntime")
    assert late.files == []


def test_a_report_leaves_its_fonts_in_our_cache(watcher):
    pytest.importorskip("matplotlib", reason="needs edge-mtp[report]")
    observed = watcher.run("-c", "from edge_bench.report.plots import draw_svg; draw_svg('a', 'b', lambda axes: None)")
    assert observed.network == []
    assert [name for name in observed.files if not name.startswith(".cache/edge-mtp/")] == []


@pytest.mark.slow
def test_onnxruntime_calls_home_by_itself_and_not_through_us(waiting):
    alone, ours = (each.result() for each in waiting)
    if not alone.files:
        pytest.skip("this build of onnxruntime has no telemetry")
    assert any("microsoft.com" in line for line in alone.network)
    assert ours.network == []


@pytest.mark.slow
def test_the_commands_leave_files_in_our_cache_only_and_connect_to_nobody(watcher, waiting, tmp_path):
    """An export of both kinds with parity, a text, a benchmark with a report, the doctor, and device profiles."""
    for library in ("llama_cpp", "onnxruntime", "onnx", "gguf", "torch", "matplotlib"):
        pytest.importorskip(library, reason="needs edge-mtp[llama,onnx,export,verify,report]")
    bundle, page = str(tmp_path / "bundle"), str(tmp_path / "page.html")
    commands = [
        ["edge_export", "reference", "--output", bundle, "--format", "both", "--context", "512"],
        ["edge_run", bundle, "--backend", "llama", "--max-tokens", "16", "def f():"],
        ["edge_bench", "run", bundle, "--backend", "onnx", *ONE_OF_EACH, "--drafters", "split", "--max-tokens", "16", "--html", page],
        ["edge_run", "doctor"],
        ["edge_devices", "profiles"],
    ]
    for function, *arguments in commands:
        start = f"from edge_devices.entry_points import {function}; {function}()"
        observed = watcher.run("-c", start, *arguments)
        assert observed.network == []
        assert [name for name in observed.files if not name.startswith(".cache/edge-mtp/")] == [], function
    assert Path(page).stat().st_size
