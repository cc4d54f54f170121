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

from llama_server_suite import BUNDLE, FILES

# Of the newest version that was tried; fewer would mean that something was left out unseen.
PASS = 70


@pytest.mark.slow
def test_their_tests_pass_here(quantized_pair: Path, tmp_path: Path) -> None:
    source = os.environ.get("EDGE_MTP_LLAMA_CPP")
    if source is None or not (tests := Path(source) / "tools" / "server" / "tests").is_dir():
        pytest.skip("needs the source of llama.cpp with tools/server/tests, at EDGE_MTP_LLAMA_CPP")
    command = [sys.executable, "-m", "pytest", "-p", "llama_server_suite", "-p", "no:cacheprovider", "-q", "-n", "0", "--tb=short"]
    paths = os.pathsep.join([str(Path(__file__).parents[2] / "support"), *sys.path])
    own = {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "EDGE_MTP_CACHE": str(tmp_path), BUNDLE: str(quantized_pair)}
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
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= PASS, done.stdout[-2000:]
