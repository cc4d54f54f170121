"""llama.cpp's own converter on several checkpoints in one process: starting it costs more than a tiny conversion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

_ALL = """
import json, runpy, sys
script, jobs = sys.argv[1], json.loads(sys.argv[2])
for job in jobs:
    sys.argv = [script, *job]
    runpy.run_path(script, run_name="__main__")
"""


def convert(jobs: Sequence[tuple[Path, Path, str]], *options: str) -> None:
    """Converts checkpoints, each to a GGUF file with weights of a type. Skips the test without llama.cpp's sources."""
    sources = os.environ.get("EDGE_MTP_LLAMA_CPP")
    if not sources or not (Path(sources) / "convert_hf_to_gguf.py").is_file():
        pytest.skip("EDGE_MTP_LLAMA_CPP does not name a folder with llama.cpp's convert_hf_to_gguf.py")
    words = [[str(folder), "--outfile", str(path), "--outtype", kind, *options] for folder, path, kind in jobs]
    done = subprocess.run(
        [sys.executable, "-c", _ALL, str(Path(sources) / "convert_hf_to_gguf.py"), json.dumps(words)],
        env=os.environ | {"PYTHONPATH": f"{sources}{os.pathsep}{sources}/gguf-py"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
