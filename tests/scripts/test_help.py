"""Every script prints its help when it is started from the root of the repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# They run in the environments of other engines (scripts/setup/build_peers.sh).
ELSEWHERE = ("export_litert_pair.py", "export_genai_target.py")
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "scripts").glob("*/*.py")
    if "__main__" in path.read_text(encoding="utf-8") and path.name not in ELSEWHERE
)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script):
    pytest.importorskip("torch", reason="some scripts import torch")
    pytest.importorskip("gguf", reason="some scripts import gguf")
    done = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: {Path(script).name} ")
