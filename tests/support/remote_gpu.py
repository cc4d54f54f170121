"""A GPU of llama.cpp for tests: ggml's RPC backend, compiled alone, whose device is another process's processor.

To llama.cpp it is a GPU with memory of its own: weights and K/V rows lie there, and nothing of the host's reads them.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from kept import ROOT, kept
from polling import wait

_SOURCES = Path(os.environ.get("EDGE_MTP_LLAMA_CPP", ROOT / "build/llama.cpp/source")) / "ggml"
_ENDPOINT = "EDGE_MTP_TEST_GPU"
# A backend that is loaded alone gives its registry by this function; that of a server has its devices.
_ENTRY = f"""
#include "ggml-backend-impl.h"
#include "ggml-rpc.h"
#include <cstdlib>
extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() {{
    return ggml_backend_rpc_add_server(getenv("{_ENDPOINT}"));
}}
"""
_SERVER = """
import ctypes, sys
base, ggml, gpu = (ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) for path in sys.argv[1:4])
ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
devices = (ctypes.c_void_p * 1)(ggml.ggml_backend_dev_by_type(0))
gpu.ggml_backend_rpc_start_server(sys.argv[4].encode(), None, ctypes.c_size_t(1), ctypes.c_size_t(1), devices)
"""


def lacking() -> str:
    """Returns what is missing; empty if nothing is."""
    if find_spec("llama_cpp") is None:
        return "needs edge-mtp[llama]"
    if shutil.which("g++") is None or sys.platform != "linux":
        return "needs Linux and g++"
    return "" if (_SOURCES / "src/ggml-rpc").is_dir() else f"needs llama.cpp's sources at {_SOURCES.parent}"


@contextmanager
def remote_gpu() -> Iterator[dict[str, str]]:
    """Starts the process; yields the environment in which llama.cpp has its processor as the GPU "rpc0"."""
    library = kept("gpu", {"entry": _ENTRY, "sources": str(_SOURCES)}, _compiled)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    libraries = [str(_libraries() / f"lib{name}.so") for name in ("ggml-base", "ggml")]
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER, *libraries, str(library), endpoint], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if "transport" in line:  # the last line before it listens
                break
        assert wait(lambda: server.poll() is not None or _listens(endpoint)), "the server does not listen"
        assert server.poll() is None
        threading.Thread(target=server.stdout.read, daemon=True).start()  # it writes lines of each client, and waits where nobody reads
        yield {"GGML_BACKEND_PATH": str(library), _ENDPOINT: endpoint}
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def _listens(endpoint: str) -> bool:
    host, _, port = endpoint.partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def _libraries() -> Path:
    spec = find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "lib"


def _compiled(path: Path) -> None:
    entry = path.with_suffix(".cpp")
    entry.write_text(_ENTRY, encoding="utf-8")
    rpc = _SOURCES / "src/ggml-rpc"
    flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-DGGML_BACKEND_BUILD", "-DGGML_BACKEND_SHARED", "-DGGML_SHARED"]
    folders = [f"-I{_SOURCES / name}" for name in ("include", "src")]
    linked = ["-o", str(path), f"-L{_libraries()}", "-lggml-base", f"-Wl,-rpath,{_libraries()}"]
    subprocess.run(["g++", *flags, *folders, str(entry), str(rpc / "ggml-rpc.cpp"), str(rpc / "transport.cpp"), *linked], check=True)
    entry.unlink()
