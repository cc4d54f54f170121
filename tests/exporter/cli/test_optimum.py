"""Our command inside Optimum's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

pytest.importorskip("optimum.version", reason="needs edge-mtp[optimum]")
pytest.importorskip("onnx", reason="needs edge-mtp[export]")

from edge_export.checkpoint.sources import reference_pair
from edge_export.cli.export import pair
from edge_runtime.bundle.bundle import open_bundle


def optimum(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = "from optimum.commands.optimum_cli import main; main()"
    return subprocess.run([sys.executable, "-c", program, "export", "edge", *arguments], capture_output=True, text=True, timeout=300)


def test_optimum_exports_the_pair_with_our_options(tmp_path: Path) -> None:
    output = tmp_path / "out"
    folders = map(str, reference_pair())
    options = "--format onnx --onnx-target int8 --onnx-block 64 --context 512 --no-verify --json"
    result = optimum(*folders, "-o", str(output), *options.split())
    assert result.returncode == 0, result.stderr
    bundle = open_bundle(output)
    assert json.loads(result.stdout)["bundle"] == str(output)
    assert bundle.file("target", "onnx").quantization == "int8-b64"
    assert bundle.manifest.runtime.context == 512
    assert bundle.manifest.parity == {"onnx": {"skipped": "it was switched off with --no-verify"}}


def test_what_is_wrong_is_a_sentence_and_the_status_ours(tmp_path: Path) -> None:
    missing = optimum(str(tmp_path / "none"), str(tmp_path / "none"), "-o", str(tmp_path / "out"))
    assert missing.returncode == 1
    assert "does not exist" in missing.stderr
    assert "Traceback" not in missing.stderr


def test_its_help_lists_every_option_of_ours() -> None:
    assert len(pair.params) > 20
    shown = optimum("--help").stdout
    for parameter in pair.params:
        assert (parameter.opts[-1] if isinstance(parameter, click.Option) else str(parameter.name)) in shown
