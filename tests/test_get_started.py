"""docs/get-started.md, command by command as it is written there, in a shell of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "get-started.md"
# What installs, downloads a published model, compiles llama.cpp or builds a container.
LEFT_OUT = re.compile(r"python3 -m venv|pip install|google/|gemma-e2b|gguf-bundle|docker|plan E2B")
# Fewer runs than the page asks for, and of the pair itself, not widened to the cost of a phone's: nobody reads these figures.
SHORT = {"edge-bench run": "--repeats 1 --max-tokens 8 --domains code --warm-up 0 --check none"}
ANSWERS = {"edge-run chat": "What is a stack?\n"}


def steps() -> list[str]:
    """The indented commands of the page, in its order."""
    return [line for line in re.findall(r"^ {4}(\S.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE) if not LEFT_OUT.search(line)]


@pytest.mark.slow(60)
def test_the_steps_run(tmp_path: Path) -> None:
    for library, extra in (("onnx", "export-onnx"), ("onnxruntime", "onnx"), ("uvicorn", "serve"), ("matplotlib", "report")):
        pytest.importorskip(library, reason=f"needs edge-mtp[{extra}]")
    lines, server = steps(), None
    assert {line.split()[0] for line in lines} == {"edge-run", "edge-export", "edge-bench", "curl"}
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "EDGE_MTP_CACHE": str(tmp_path / "cache"),
    }
    try:
        for line in lines:
            name = " ".join(line.split()[:2])
            command = f"{line} {SHORT.get(name, '')}".replace(" --widened", "").replace("8080", "18573")
            command = command.replace("curl -s", "curl -s --retry 9 --retry-connrefused")
            if name == "edge-run serve":
                server = subprocess.Popen(f"exec {command}", shell=True, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
                continue
            done = subprocess.run(
                command, shell=True, cwd=tmp_path, env=environment, input=ANSWERS.get(name, ""), capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            if name.startswith("curl"):
                assert "last item in is the first one out" in done.stdout
    finally:
        if server is not None:
            server.terminate()
            server.wait(30)
    assert "speed" in (tmp_path / "report.html").read_text(encoding="utf-8")
