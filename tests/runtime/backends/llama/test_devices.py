"""llama.cpp's devices: the CPU unless another is asked for, whatever the build has."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

llama_cpp = pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

from edge_runtime.backends.llama import loader as llama_devices
from edge_runtime.backends.llama.loader import LlamaDevice, device_named, layers_that_fit, offloaded_to
from edge_runtime.errors import RequestError
from kept import ROOT, kept
from polling import wait

# The GPU of tests: ggml's RPC backend, compiled alone, whose device is another process's processor.
SOURCES = Path(os.environ.get("EDGE_MTP_LLAMA_CPP", ROOT / "build/llama.cpp/source")) / "ggml"
ENDPOINT = "EDGE_MTP_TEST_GPU"
# A backend that is loaded alone gives its registry by this function; that of a server has its devices.
ENTRY = f"""
#include "ggml-backend-impl.h"
#include "ggml-rpc.h"
#include <cstdlib>
extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() {{
    return ggml_backend_rpc_add_server(getenv("{ENDPOINT}"));
}}
"""
SERVER = """
import ctypes, sys
base, ggml, gpu = (ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) for path in sys.argv[1:4])
ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
devices = (ctypes.c_void_p * 1)(ggml.ggml_backend_dev_by_type(0))
gpu.ggml_backend_rpc_start_server(sys.argv[4].encode(), None, ctypes.c_size_t(1), ctypes.c_size_t(1), devices)
"""
LIBRARIES = Path(llama_cpp.__file__).parent / "lib"
_SESSION = """
import json, sys
import edge_runtime
from edge_runtime.backends.llama.loader import llama_library
results, sentences, log = [], [], []
llama_library().log.add = lambda _, text: log.append(text)
for device in sys.argv[2:]:
    options = dict(backend="llama", context=256, threads=1, measure=False, check="none", notify=sentences.append)
    with edge_runtime.open_session(sys.argv[1], device=device, **options) as session:
        generations = [session.generate("def area(r):", max_tokens=24, draft_length=length) for length in (0, 3)]
        texts, accepted = [each.text() for each in generations], generations[-1].stats.accepted
        facts = {"device": session.device, "drafter": session.drafter_kind, "texts": texts, "accepted": accepted}
    results.append(facts | {"buffers": [line for line in log if "buffer size" in line]})
    log.clear()
print(json.dumps({"results": results, "sentences": sentences}))
"""


@pytest.fixture(scope="module")
def gpu() -> Iterator[dict[str, str]]:
    """The environment in which llama.cpp has another process's processor as the GPU "rpc0".

    To llama.cpp it is a GPU with memory of its own: weights and K/V rows lie there, and nothing of the host's reads them.
    """
    if shutil.which("g++") is None or sys.platform != "linux":
        pytest.skip("needs Linux and g++")
    if not (SOURCES / "src/ggml-rpc").is_dir():
        pytest.skip(f"needs llama.cpp's sources at {SOURCES.parent}")
    library = kept("gpu", {"entry": ENTRY, "sources": str(SOURCES)}, compiled)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    libraries = [str(LIBRARIES / f"lib{name}.so") for name in ("ggml-base", "ggml")]
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, *libraries, str(library), endpoint], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if "transport" in line:  # the last line before it listens
                break
        assert wait(lambda: server.poll() is not None or listens(endpoint)), "the server does not listen"
        assert server.poll() is None
        threading.Thread(target=server.stdout.read, daemon=True).start()  # it writes lines of each client, and waits where nobody reads
        yield {"GGML_BACKEND_PATH": str(library), ENDPOINT: endpoint}
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def listens(endpoint: str) -> bool:
    host, _, port = endpoint.partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def compiled(path: Path) -> None:
    entry = path.with_suffix(".cpp")
    entry.write_text(ENTRY, encoding="utf-8")
    rpc = SOURCES / "src/ggml-rpc"
    flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-DGGML_BACKEND_BUILD", "-DGGML_BACKEND_SHARED", "-DGGML_SHARED"]
    folders = [f"-I{SOURCES / name}" for name in ("include", "src")]
    linked = ["-o", str(path), f"-L{LIBRARIES}", "-lggml-base", f"-Wl,-rpath,{LIBRARIES}"]
    subprocess.run(["g++", *flags, *folders, str(entry), str(rpc / "ggml-rpc.cpp"), str(rpc / "transport.cpp"), *linked], check=True)
    entry.unlink()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run(script: str, *arguments: str, environment: dict[str, str], cache: Path) -> Any:
    paths = os.pathsep.join(filter(None, sys.path))
    full = os.environ | environment | {"PYTHONPATH": paths, "EDGE_MTP_CACHE": str(cache)}
    result = subprocess.run([sys.executable, "-c", script, *arguments], env=full, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_layers_run_on_the_gpu_only_if_it_is_asked_for(gpu: dict[str, str], quantized_pair: Path, tmp_path: Path) -> None:
    answer = run(_SESSION, str(quantized_pair), "cpu", "gpu", environment=gpu, cache=tmp_path)
    cpu, other = answer["results"]
    assert (cpu["device"], other["device"]) == ("cpu", "rpc0")
    assert not any("RPC" in line for line in cpu["buffers"])
    assert any("RPC" in line and "model" in line for line in other["buffers"])
    assert any("RPC" in line and "KV" in line for line in other["buffers"])
    assert other["drafter"] == "dense"
    assert other["texts"][0] == other["texts"][1] == cpu["texts"][0]
    assert other["accepted"] > 0
    assert any("rpc0 computes what the CPU does" in sentence for sentence in answer["sentences"])


def test_the_faster_device_is_measured_once_and_taken(gpu: dict[str, str], quantized_pair: Path, cache: Path) -> None:
    script = """
import json, sys
import edge_runtime
answers = []
for _ in range(2):
    sentences = []
    with edge_runtime.open_session(sys.argv[1], device="auto", context=256, threads=1, notify=sentences.append) as session:
        answers.append([session.device, sentences])
print(json.dumps(answers))
"""
    (device, sentences), (again, no_more) = run(script, str(quantized_pair), environment=gpu, cache=cache)
    choice = next(sentence for sentence in sentences if sentence.startswith("Backend: "))
    assert ("llama.cpp on rpc0" in choice.partition(",")[0]) == (device == "rpc0")
    assert choice.endswith("--device takes the other one.")
    assert again == device
    assert not any("Measuring" in sentence for sentence in no_more)


def test_devices_are_compared_side_by_side(gpu: dict[str, str], quantized_pair: Path, cache: Path) -> None:
    script = """
import sys
from edge_devices.entry_points import edge_run
sys.argv[:1] = ["edge-run", "compare"]
edge_run()
"""
    options = ["--device", "cpu,gpu", "-n", "8", "--repeats", "1", "--draft-length", "3", "--json"]
    devices = run(script, str(quantized_pair), "def area(r):", *options, environment=gpu, cache=cache)["devices"]
    assert list(devices) == ["llama.cpp on cpu", "llama.cpp on rpc0"]
    assert all(each["drafted_tokens"] > 0 and each["same_tokens"] for each in devices.values())


def test_a_part_of_the_layers_runs_on_the_gpu_and_drafts_are_accepted(gpu: dict[str, str], quantized_pair: Path, cache: Path) -> None:
    script = """
import json, sys
from edge_runtime.backends.llama import loader as devices
devices.LlamaDevice.free_bytes = lambda _: int(sys.argv[2])
import edge_runtime
sentences = []
options = dict(backend="llama", device="rpc0", context=256, threads=1, measure=False, notify=sentences.append)
try:
    with edge_runtime.open_session(sys.argv[1], **options) as session:
        generation = session.generate("def area(r):", max_tokens=24, draft_length=3)
        print(json.dumps([generation.text(), generation.stats.accepted, sentences]))
except edge_runtime.EdgeRuntimeError as error:
    print(json.dumps(["", 0, [str(error)]]))
"""
    text, accepted, sentences = run(script, str(quantized_pair), str(12_000_000), environment=gpu, cache=cache)
    assert any(" layers run on rpc0, which has 12.0 MB of free memory" in sentence for sentence in sentences), sentences
    assert text
    assert accepted > 0
    _, _, refused = run(script, str(quantized_pair), str(1_000_000), environment=gpu, cache=cache)
    assert refused[0].startswith("rpc0 has 1.0 MB of free memory, too few for a layer beside the KV cache and activations of")


def test_a_plug_in_that_is_none_and_a_device_that_is_not_there_are_named(tmp_path: Path, quantized_pair: Path) -> None:
    script = """
import json, sys
import edge_runtime
try:
    edge_runtime.open_session(sys.argv[1], backend="llama", device=sys.argv[2])
except edge_runtime.EdgeRuntimeError as error:
    print(json.dumps(str(error)))
"""
    none = tmp_path / "libggml-none.so"
    message = run(script, str(quantized_pair), "gpu", environment={"GGML_BACKEND_PATH": str(none)}, cache=tmp_path)
    assert message.startswith(f"{none}, which $GGML_BACKEND_PATH names, is no backend of this llama.cpp")
    message = run(script, str(quantized_pair), "vulkan0", environment={}, cache=tmp_path)
    assert message == "there is no device 'vulkan0' that llama.cpp computes on here; there are cpu"


def device(**changes: Any) -> LlamaDevice:
    return LlamaDevice(**{"name": "vulkan0", "kind": "gpu", "hardware": "a board", "driver": "1", "handle": 7, **changes})


def test_devices_are_found_by_name_or_kind_and_the_cpu_is_an_empty_list(monkeypatch: pytest.MonkeyPatch) -> None:
    there = (device(), device(name="vulkan1", handle=8), device(name="htp0", kind="npu", handle=9))
    monkeypatch.setattr(llama_devices, "devices", lambda: there)
    assert [device_named(name).handle for name in ("gpu", "Vulkan1", "npu")] == [7, 8, 9]
    assert list(offloaded_to("cpu")) == [None]
    assert list(offloaded_to("vulkan1")) == [8, None]
    with pytest.raises(RequestError, match=r"there are cpu, vulkan0, vulkan1, htp0$"):
        device_named("metal")


@pytest.mark.parametrize(("free", "layers"), [(None, -1), (1300, -1), (1299, 19), (800, 10), (300, 0), (100, 0)])
def test_as_many_layers_as_fit_beside_what_forwards_take(free: int | None, layers: int) -> None:
    assert layers_that_fit(free, weights=1000, beside=300, layers=20) == layers
