"""llama-server's own tests, unchanged, against this server: what they ask of the APIs that both have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("requests", reason="llama-server's tests need requests")
pytest.importorskip("filelock", reason="llama-server's tests need filelock")
pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
pytest.importorskip("gguf", reason="needs edge-mtp[export]")
pytest.importorskip("PIL", reason="needs edge-mtp[media]")

from llama_server_suite import FILES, FOLDER
from pictures import picture_bundle

# Of the newest version that was tried: cases that clients of both servers meet, and how many of them may differ.
MET = 93
DIFFER = 8


@pytest.mark.slow
def test_their_tests_pass_here(tmp_path: Path) -> None:
    source = os.environ.get("EDGE_MTP_LLAMA_CPP")
    if source is None or not (tests := Path(source) / "tools" / "server" / "tests").is_dir():
        pytest.skip("needs the source of llama.cpp with tools/server/tests, at EDGE_MTP_LLAMA_CPP")
    picture_bundle()
    options = "-p llama_server_suite -p no:cacheprovider -p no:randomly -q -n 0 --tb=short"
    command = [sys.executable, "-m", "pytest", *options.split()]
    paths = os.pathsep.join([str(Path(__file__).parents[2] / "support"), *sys.path])
    own = {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "EDGE_MTP_CACHE": str(tmp_path), FOLDER: str(tmp_path / "bundles")}
    done = subprocess.run(
        [*command, *(f"unit/{name}" for name in FILES)],
        cwd=tests,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    counted = re.search(r"met by clients: (\d+) cases, (\d+) pass, (\d+) differ", done.stdout)
    assert counted is not None
    met, passed, differ = map(int, counted.groups())
    assert (passed + differ, differ) == (met, DIFFER), done.stdout[-2000:]
    assert met >= MET, "fewer would mean that something was left out unseen"
