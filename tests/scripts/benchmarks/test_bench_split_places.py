"""Prompts computed on one device and decoded on the other: here both are the CPU, whose rows are moved as a device's are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
pytest.importorskip("onnx", reason="needs edge-mtp[export]")

from click.testing import CliRunner

import bench_split_places
from edge_runtime.config.schema import SpeculativeConfig, TuningConfig

FIXED = SpeculativeConfig(tuning=TuningConfig(draft_length=3))


@pytest.mark.parametrize(("wrong", "code"), [(False, 0), (True, 1)])
def test_moved_rows_give_the_same_text(
    onnx_pair: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, wrong: bool, code: int
) -> None:
    opened = bench_split_places.open_session

    def on_cpu(bundle: Path, *, device: str, context: int, **_: Any) -> Any:
        session = opened(bundle, backend="onnx", context=context, threads=1, config=FIXED)
        if device != "cpu":
            session.device = "webgpu"
            state = session.target.state
            if wrong:  # as of a device that gives rows of nothing
                session.target.state = lambda: state()._replace(full=np.zeros_like(state().full))
        return session

    monkeypatch.setattr(bench_split_places, "open_session", on_cpu)
    path = tmp_path / "split.json"
    arguments = [str(onnx_pair("f32")), "--prompt", "40", "--tokens", "8", "--repeats", "1", "--json", str(path)]
    result = CliRunner().invoke(bench_split_places.main, arguments)
    assert result.exit_code == code, result.output
    figures = json.loads(path.read_text())["prompt_40"]
    assert list(figures) == ["cpu", "webgpu", "prompt on webgpu", "prompt on cpu"]
    moved = figures["prompt on webgpu"]
    assert (moved["moved_bytes"] > 0, moved["same_output"]) == (True, not wrong)
    assert figures["cpu"]["moved_bytes"] == 0
    assert "is allowed" in result.output
