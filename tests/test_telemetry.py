"""Nothing of ours calls home: each way in is watched for names, connections and files, and so is onnxruntime by itself, as the control."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from bench_records import ONE_OF_EACH
from edge_devices import SWITCHES

PACKAGES = ("edge_devices", "edge_runtime", "edge_export")
# onnxruntime's uploader sends its first events after about nine seconds.
WAIT_S = 12
RUNTIME = "from edge_runtime.backends.onnx.devices import onnxruntime_module; onnxruntime_module()"
# A library that is loaded before the C library reports every `getaddrinfo` and every `connect` to an internet address, and fails them: what
# C code does is seen too, and nothing leaves the machine.
WATCH = r"""
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void note(const char *what, const char *name) {
  const char *path = getenv("NETWORK_LOG");
  int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
  char line[300];
  if (file < 0) return;
  int length = snprintf(line, sizeof line, "%s %.200s\n", what, name);
  if (write(file, line, length) != length) abort();
  close(file);
}
static int local(const char *name) {
  return !name || !strcmp(name, "localhost") || !strcmp(name, "::1") || !strncmp(name, "127.", 4) || !strcmp(name, "0.0.0.0");
}
int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
  int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) = dlsym(RTLD_NEXT, "getaddrinfo");
  if (local(name)) return real(name, service, hints, found);
  note("resolve", name);
  return EAI_FAIL;
}
int connect(int socket, const struct sockaddr *address, socklen_t length) {
  int (*real)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "connect");
  char text[64] = "";
  if (address->sa_family == AF_INET) inet_ntop(AF_INET, &((struct sockaddr_in *)address)->sin_addr, text, sizeof text);
  else if (address->sa_family == AF_INET6) inet_ntop(AF_INET6, &((struct sockaddr_in6 *)address)->sin6_addr, text, sizeof text);
  else return real(socket, address, length);
  if (local(text)) return real(socket, address, length);
  note("connect", text);
  errno = ENETUNREACH;
  return -1;
}
"""
# What makes libraries silent by itself, so that a test would see nothing where a user sees something.
SILENT_ANYWAY = ("CI", "TF_BUILD", "GITHUB_ACTIONS", "ORT_RUNNING_UNIT_TESTS", "HF_HUB_OFFLINE", "MPLCONFIGDIR", "EDGE_MTP_CACHE")


@dataclass(frozen=True)
class Watched:
    """What a program did. `files` are relative to its home."""

    network: list[str]
    files: list[str]
    output: str


class Watcher:
    """Runs programs, each in an empty home; its folder holds the library and the homes."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None or sys.platform != "linux":
            pytest.skip("needs Linux and a C compiler (apt install gcc)")
        self._folder, self._library, self._runs = folder, folder / "watch.so", count(1)
        source = folder / "watch.c"
        source.write_text(WATCH)
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(self._library), str(source), "-ldl"], check=True)

    def run(self, *arguments: str, **variables: str) -> Watched:
        """Runs Python with these arguments in a home of its own, without the variables that switch telemetry off; any thread may."""
        number = next(self._runs)
        home, log = self._folder / f"home{number}", self._folder / f"log{number}"
        home.mkdir()
        unset = {*SILENT_ANYWAY, *SWITCHES, "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME"}
        env = {key: value for key, value in os.environ.items() if key not in unset} | {
            "HOME": str(home),
            "NETWORK_LOG": str(log),
            "LD_PRELOAD": str(self._library),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command, both = [sys.executable, *arguments], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, env=env | variables, cwd=home, text=True, check=False, **both)
        assert done.returncode == 0, done.stdout
        files = sorted(path.relative_to(home).as_posix() for path in home.rglob("*") if not path.is_dir())
        return Watched(network=log.read_text().splitlines() if log.exists() else [], files=files, output=done.stdout)


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
