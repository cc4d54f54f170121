"""What tests of several floors share: the reference pair as an exported bundle, and a probe memory of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:
    # A worker has one processor, see below: a second thread of OpenBLAS would spin on it while the first computes. Before numpy is there.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

import edge_devices  # noqa: F401  # switches telemetry off before a test imports onnxruntime
import phones
import ssh_host
from edge_devices.errors import EdgeError
from edge_devices.files.user_cache import cache_folder
from edge_devices.machine import processors
from edge_devices.machine.memory import available_memory_bytes
from kept import ROOT, shipped_bundle

pytest_plugins = ["short_set"]

# Files are replaced thousands of times, and each time waits milliseconds for a disk.
MEMORY = Path("/dev/shm")
ENOUGH_BYTES = 4 << 30


def files_in_memory() -> bool:
    """Whether tests may keep their files in memory: programs among them can run there, and there is room for those of a whole run."""
    if not os.access(MEMORY, os.W_OK):
        return False
    room = os.statvfs(MEMORY)
    free = min(room.f_bavail * room.f_frsize, (available_memory_bytes() or 0) // 2)
    return free > ENOUGH_BYTES and not room.f_flag & os.ST_NOEXEC


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Gives each worker its own processors, or one: threads of llama.cpp that share them wait for each other actively."""
    # A shell that runs the tests in the background has them ignore Ctrl-C, and what they start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    worker = getattr(config, "workerinput", None)
    for kind in ("LOCAL", "GLOBAL"):  # as in the Makefile
        os.environ.setdefault(f"ZIG_{kind}_CACHE_DIR", str(ROOT / "build/zig"))
    if worker is None and files_in_memory():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    if worker is not None and hasattr(os, "sched_setaffinity"):
        every, number = sorted(os.sched_getaffinity(0)), int(worker["workerid"].removeprefix("gw"))
        own = every[number :: int(worker["workercount"])] or every[number % len(every) :][:1]
        os.sched_setaffinity(0, own)


def pytest_sessionstart() -> None:
    """Lets the garbage collector fail at Python's recursion limit.

    Hostile input reaches that limit on purpose. If the collector happens to run there, the callbacks of what it frees have no stack left;
    pytest would count that as a failure of whichever test it was.
    """
    report = sys.unraisablehook

    def report_others(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, RecursionError):
            report(unraisable)

    sys.unraisablehook = report_others


def pytest_unconfigure() -> None:
    """Closes what llama_cpp leaves open: beside torch, Python says so when it ends, as our filter of warnings is still its last."""
    if (llama := sys.modules.get("llama_cpp._utils")) is not None:
        for file in (llama.outnull_file, llama.errnull_file):
            file.close()


@pytest.fixture(autouse=True)
def unknown_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tests print and keep does not depend on how busy the machine is: the load is not known, as on other systems than Linux."""
    monkeypatch.setattr(processors, "STAT", Path("/nonexistent/stat"))
    monkeypatch.setattr(processors, "PRESSURE", Path("/nonexistent/pressure"))
    monkeypatch.setattr(processors, "BEFORE_SECONDS", 0.0)


@pytest.fixture(scope="session")
def exported_pair() -> Path:
    """The shipped pair as a float16 bundle."""
    pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
    pytest.importorskip("gguf", reason="needs edge-mtp[export]")
    return shipped_bundle(target_quantization="f16", drafter_quantization="f16")


@pytest.fixture(scope="session")
def quantized_pair() -> Path:
    """The shipped pair in q4_0, which the row kernels multiply."""
    pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
    pytest.importorskip("gguf", reason="needs edge-mtp[export]")
    return shipped_bundle()


@pytest.fixture(scope="session")
def onnx_pair() -> Callable[..., Path]:
    """Returns a function from "f32", "int8" or "int4" to the shipped pair as an ONNX bundle.

    Further values of an `OnnxRequest` may be named.
    """
    pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
    pytest.importorskip("onnx", reason="needs edge-mtp[export]")
    from edge_export.onnx.request import OnnxRequest, OnnxWeights

    def bundle_of(weights: OnnxWeights, **changes: Any) -> Path:
        return shipped_bundle(gguf=False, onnx=OnnxRequest(target=weights, drafter=weights, **changes))

    return bundle_of


@pytest.fixture(scope="module", autouse=True)
def probe_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache for each file: what was measured before, by its user or by another file, is no matter. Downloads are the user's."""
    folder = tmp_path_factory.mktemp("cache")
    with contextlib.suppress(OSError, EdgeError):  # a user without a home folder
        downloads = cache_folder() / "packages"
        downloads.mkdir(parents=True, exist_ok=True)
        (folder / "packages").symlink_to(downloads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGE_MTP_CACHE", str(folder))
        yield


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[phones.Desk]:
    """An adb server for each file, and the phones that its tests put on the desk."""
    if phones.NEEDS:
        pytest.skip(phones.NEEDS)
    made = phones.Desk(tmp_path_factory.mktemp("desk"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANDROID_ADB_SERVER_PORT", str(made.port))
        yield made
    made.close()


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssh_host.SshHost]:
    """A host that ssh knows as "pi" with `-F host.config`."""
    if ssh_host.NEEDS:
        pytest.skip(ssh_host.NEEDS)
    made = ssh_host.SshHost(tmp_path_factory.mktemp("sshd"))
    yield made
    made.stop()
