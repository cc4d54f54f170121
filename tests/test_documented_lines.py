"""The frequent commands of the quick start run as they stand there, on a bundle of each engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "quick-start.md"
# What waits for clients, measures for minutes, needs a phone, a meter or a key, builds with apt, or reads what these would have written.
LEFT_OUT = ("edge-run serve", "edge-bench run", "--adb", "energy.jsonl", "--verify-key", "edge-export package")
NEEDS = {"--json-schema": ("llguidance", "grammar"), "publish": ("huggingface_hub", "export")}


def documented() -> list[str]:
    """The commands below *Frequent commands*, one for each choice of `a|b`, without their comments."""
    section = PAGE.read_text(encoding="utf-8").split("## Frequent commands\n")[1].split("\n## ")[0]
    lines = []
    for line in re.findall(r"^    (edge-.*)$", section, re.MULTILINE):
        command = line.split(" #")[0].rstrip()
        choices = re.search(r"\S+(\|\S+)+", command)
        lines += [command.replace(choices[0], choice) for choice in choices[0].split("|")] if choices else [command]
    return [command for command in lines if not any(part in command for part in LEFT_OUT)]


def test_most_lines_are_run() -> None:
    assert len(documented()) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["gguf", "onnx"])
def test_the_lines_run(engine: str, request: pytest.FixtureRequest, onnx_pair: Callable[[str], Path], tmp_path: Path) -> None:
    bundle = request.getfixturevalue("exported_pair") if engine == "gguf" else onnx_pair("int4")
    (tmp_path / "my-bundle").symlink_to(bundle)
    (tmp_path / "schema.json").write_text(json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}))
    binaries = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": binaries, "PYTHONPATH": os.pathsep.join(sys.path), "EDGE_MTP_CACHE": str(tmp_path / "cache")}
    for command in documented():
        for word, (library, extra) in NEEDS.items():
            if word in command:
                pytest.importorskip(library, reason=f"needs edge-mtp[{extra}]")
        done = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), f"{command}\n{done.stderr[-2000:]}"
