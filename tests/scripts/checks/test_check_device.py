"""Random pairs and texts on accelerators: here on the CPU, and on a device that is not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="needs edge-mtp[export]")
pytest.importorskip("torch", reason="makes random pairs")

from click.testing import CliRunner

import check_device


def test_texts_with_drafts_are_compared_with_plain_ones(onnx_pair: Callable[..., Path], tmp_path: Path) -> None:
    words = ["--device", "cpu", "--bundle", str(onnx_pair("f32")), "--pairs", "3", "--output", str(tmp_path / "records")]
    result = CliRunner().invoke(check_device.main, words)
    assert result.exit_code == 0, result.output
    assert "3 of 3 texts with drafts are those of plain decoding on cpu" in result.output
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    assert [record["drafts"] for record in records] == [1, 2, 3]
    assert all(record["tokens"] == check_device.TOKENS and record["drafted"] > record["accepted"] > 0 for record in records)


def test_where_nothing_runs_nothing_was_checked() -> None:
    """What a device says that it does not run is no alarm, but a device that is not there fails."""
    result = CliRunner().invoke(check_device.main, ["--device", "cuda", "--pairs", "1"])
    assert (result.exit_code, "0 of 0 pairs passed the check of cuda; 1 more do not run there" in result.output) == (1, True), result.output


def test_a_session_on_the_cpu_is_no_passed_check() -> None:
    record = next(check_device.pair_records("cpu", "onnx", 0))
    assert record["passed"] is False
