"""Every script prints its help when it is started from the root of the repository."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# It runs in the environment of another engine (scripts/setup/build_peers.sh).
ELSEWHERE = "export_litert_pair.py"
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "scripts").glob("*/*.py")
    if "__main__" in path.read_text(encoding="utf-8") and path.name != ELSEWHERE
)


# One process imports what takes seconds, and forks for each script.
RUN_ALL = """
import contextlib, json, os, runpy, sys, tempfile
import gguf, numpy, safetensors.torch, tokenizers, torch, edge_bench.cli.main, edge_export.pipeline.export, edge_runtime.session.open
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM
answers = {}
for script in sys.argv[1:]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if not (child := os.fork()):
            os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
            sys.argv, sys.path[0], code = [script, "--help"], os.path.dirname(script), 1
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as ended:
                code = ended.code
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                os._exit(code or 0 if isinstance(code, int | None) else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = [(file.seek(0), file.read())[1] for file in (out, err)]
    answers[script] = [code, *texts]
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[int, str, str]]:
    """The exit status, output and errors of each script."""
    for library in ("torch", "transformers", "gguf"):
        pytest.importorskip(library, reason=f"some scripts import {library}")
    done = subprocess.run([sys.executable, "-c", RUN_ALL, *SCRIPTS], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow(0.3)
@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script: str, answers: dict[str, tuple[int, str, str]]) -> None:
    code, output, errors = answers[script]
    assert (code, errors) == (0, "")
    assert output.startswith(f"Usage: {Path(script).name} ")
