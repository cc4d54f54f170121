"""The plug-in's defects that the target's graph is changed for are there, and their script finds them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import software_gpu

SCRIPT = Path(__file__).parents[3] / "scripts" / "checks" / "check_webgpu_defects.py"


@pytest.mark.slow(2)
@pytest.mark.skipif(bool(software_gpu.lacking()), reason=software_gpu.lacking() or "it is there")
@pytest.mark.parametrize(("case", "wrong"), [("attention of 31 queries (control)", False), ("attention of 32 queries", True)])
def test_a_case(case: str, wrong: bool, tmp_path: Path) -> None:
    everything = os.environ | software_gpu.environment(tmp_path)
    done = subprocess.run([sys.executable, SCRIPT, "--case", case], env=everything, capture_output=True, text=True, check=True)
    assert (json.loads(done.stdout) > 0.1) == wrong
