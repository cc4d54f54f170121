"""llama.cpp's own converter in one process for all checkpoints: starting it costs more than a tiny conversion."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

SCRIPT = Path(os.environ.get("EDGE_MTP_LLAMA_CPP") or "/nowhere") / "convert_hf_to_gguf.py"
# Answers each line of jobs with a line when they are done; what they say and how they fail is in its errors.
_SERVE = """
import contextlib, json, runpy, sys, traceback
script, answers = sys.argv[1], sys.stdout
sys.stdout = sys.stderr
for line in sys.stdin:
    for job in json.loads(line):
        sys.argv = [script, *job]
        try:
            runpy.run_path(script, run_name="__main__")
        except BaseException:
            traceback.print_exc()
    sys.stderr.flush()
    print(file=answers, flush=True)
"""


class _Converter:
    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(SCRIPT)],
            env=os.environ | {"PYTHONPATH": f"{SCRIPT.parent}{os.pathsep}{SCRIPT.parent}/gguf-py"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def run(self, jobs: list[list[str]]) -> str:
        place = self._log.seek(0, os.SEEK_END)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(jobs) + "\n")
        self._process.stdin.flush()
        ended = self._process.stdout.readline() == "\n"
        self._log.seek(place)
        output = self._log.read()
        assert ended, output[-3000:]
        return output

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()


@cache
def _converter() -> _Converter:
    made = _Converter()
    atexit.register(made.end)
    return made


def convert(jobs: Sequence[tuple[Path, Path, str]], *options: str, may_fail: bool = False) -> str:
    """Converts checkpoints, each to a GGUF file with weights of a type; returns what the converter said, failures included.

    Skips the test without llama.cpp's sources.
    """
    if not SCRIPT.is_file():
        pytest.skip("EDGE_MTP_LLAMA_CPP does not name a folder with llama.cpp's convert_hf_to_gguf.py")
    output = _converter().run([[str(folder), "--outfile", str(path), "--outtype", kind, *options] for folder, path, kind in jobs])
    assert may_fail or all(path.is_file() for _, path, _ in jobs), output[-3000:]
    return output
