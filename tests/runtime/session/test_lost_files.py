"""Files of a model that are cut, written over, replaced or removed while they are mapped, on both backends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from edge_devices.files.user_cache import CACHE_VARIABLE
from edge_runtime.backends.kernels.loader import load_library

if sys.platform != "linux" or load_library() is None:
    pytest.skip("needs the row kernels' library, on Linux", allow_module_level=True)

# Generates, has the files changed, and generates again.
RUN = """
import os, sys
from pathlib import Path
from edge_runtime.session.open import open_session
bundle, change, backend = sys.argv[1:]
with open_session(bundle, threads=1, backend=backend, check="fast") as session:
    def text():
        return session.generate("def area(r):", max_tokens=12, draft_length=2).text()
    first = text()
    for path in Path(bundle).rglob("*"):
        if path.is_file():
            if change == "cut":
                os.truncate(path, 0)
            if change == "replaced":
                other = path.with_suffix(".other")
                other.write_bytes(os.urandom(100))
                other.replace(path)
            if change == "removed":
                path.unlink()
    print(text() == first, flush=True)
"""
SENTENCE = (
    "Error: a file of the model became shorter, or its disk failed, while it was in use;"
    " do not write to files of a bundle that runs, put new ones in their place"
)


@pytest.fixture(params=["llama", "onnx"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs a session whose files change in such a way."""
    kind = request.param
    source = request.getfixturevalue("quantized_pair") if kind == "llama" else request.getfixturevalue("onnx_pair")("int4")
    bundle = copytree(source, tmp_path / "bundle")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), CACHE_VARIABLE: str(tmp_path / "cache")}

    def run(change: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", RUN, str(bundle), change, kind]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)

    return run


def test_a_file_that_is_cut_while_it_is_mapped_ends_in_a_sentence(opened: Callable[[str], subprocess.CompletedProcess[str]]) -> None:
    ended = opened("cut")
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", SENTENCE + "\n")


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_other_files_in_their_place_change_nothing(change: str, opened: Callable[[str], subprocess.CompletedProcess[str]]) -> None:
    ended = opened(change)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")


def test_a_program_that_handles_the_signal_itself_keeps_its_handler() -> None:
    code = (
        "import faulthandler, os, signal; faulthandler.enable()\n"
        "from edge_runtime.backends.kernels.loader import end_on_lost_files\n"
        "end_on_lost_files(); os.kill(os.getpid(), signal.SIGBUS)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode < 0
    assert "Fatal Python error: Bus error" in ended.stderr
