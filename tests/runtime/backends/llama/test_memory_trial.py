"""Where `ulimit -v` leaves little, a bundle is refused with one sentence; nothing dies of a signal, and no debugger is called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge_devices.files.user_cache import CACHE_VARIABLE
from edge_runtime.backends.llama.context import LlamaOptions
from edge_runtime.backends.llama.memory_trial import try_in_child
from edge_runtime.errors import BackendError

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
if sys.platform != "linux":
    pytest.skip("only Linux limits the address space and reports it", allow_module_level=True)

# Opens a bundle where the libraries are loaded already and so many bytes more may be mapped.
OPEN = """
import resource, sys
from edge_devices.errors import EdgeError
from edge_devices.machine.memory import mapped_bytes, share_one_arena
from edge_runtime.backends.llama.loader import llama_library
from edge_runtime.session.open import open_session
share_one_arena()
llama_library()
resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes() + int(sys.argv[2]),) * 2)
try:
    with open_session(sys.argv[1], backend="llama", threads=1, drafter="dense") as session:
        print(len(session.generate("def", max_tokens=4, draft_length=2).text()))
except EdgeError as error:
    print("refused:", error)
"""
ABORT = """
from edge_runtime.backends.llama.loader import llama_library
library = llama_library()
for each in (library.ggml, library.api._lib):
    import os
    if os.fork() == 0:
        each.ggml_abort(b"/a/build/ggml.c", 12, b"GGML_ASSERT(%s) failed", b"x > 0")
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def run(code: str, *arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), CACHE_VARIABLE: str(cache)}
    environment.pop("GGML_NO_BACKTRACE", None)
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, timeout=300, check=False
    )


@pytest.mark.parametrize("megabytes", [20, 80, 100, 120])
def test_too_little_address_space_ends_in_a_sentence(megabytes: int, exported_pair: Path, tmp_path: Path) -> None:
    """The bundle needs from 90 MB to 160 MB more, by the machine and its threads; below, llama.cpp would abort at some sizes."""
    ended = run(OPEN, str(exported_pair), str(megabytes << 20), cache=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("\n") == 1
    if megabytes < 80 or not ended.stdout.strip().isdecimal():
        assert ended.stdout.startswith("refused: ")
        assert "(ulimit -v)" in ended.stdout
    # A death of want of memory is no fault of the build: nothing is kept about kernels.
    kept = tmp_path / "measured.json"
    assert not kept.exists() or "probe " not in kept.read_text()


def test_enough_address_space_is_enough(exported_pair: Path, tmp_path: Path) -> None:
    ended = run(OPEN, str(exported_pair), str(700 << 20), cache=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert int(ended.stdout) > 0


def test_a_trial_passes_the_reason_on(tmp_path: Path) -> None:
    with pytest.raises(
        BackendError, match=r"^1\.00 GB of address space are left \(ulimit -v\), .* has no manifest.json.*; raise that limit"
    ):
        try_in_child(tmp_path, LlamaOptions(context=64, threads=1), None, 10**9)


def test_a_failed_check_of_ggml_ends_with_a_sentence_and_without_a_debugger(tmp_path: Path) -> None:
    ended = run(ABORT, cache=tmp_path)
    assert ended.stdout.split() == ["1", "1"]
    sentence = "Error: llama.cpp cannot go on (ggml.c:12: GGML_ASSERT(x > 0) failed); free some memory, or export the bundle again"
    assert ended.stderr.splitlines() == [sentence] * 2
