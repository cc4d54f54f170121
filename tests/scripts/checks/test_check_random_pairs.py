"""Random pairs: what a pair's record holds, and when the check fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("onnx", reason="needs edge-mtp[export]")
pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
pytest.importorskip("transformers", reason="needs edge-mtp[verify]")
pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

import check_random_pairs
from random_pairs import write_random_pair

EQUAL = {"texts": {"llama": {"compared": 8, "equal": 8}, "onnx": {"compared": 8, "equal": 8}}}
REFUSED = {"refused": "parity failed", "float32": {"onnx": {"mean_kl": 1e-12}, "llama": {"mean_kl": 1e-9}}}
WRONG = {"refused": "parity failed", "float32": {"onnx": {"mean_kl": 1e-12}, "llama": {"refused": "parity failed"}}}
OTHER_TEXT = {"texts": EQUAL["texts"] | {"onnx": {"compared": 8, "equal": 7}}}


@pytest.mark.parametrize(
    ("record", "failed", "words"),
    [
        (EQUAL, False, "1 pairs: 0 refused, 0 of them in float32 too; 16 of 16 texts"),
        (EQUAL | REFUSED, False, "1 refused, 0 of them in float32 too; 16 of 16"),
        (EQUAL | WRONG, True, "1 refused, 1 of them in float32 too; 16 of 16"),
        (OTHER_TEXT, True, "0 refused, 0 of them in float32 too; 15 of 16"),
    ],
)
def test_a_pair_off_in_float32_or_another_text_fails(record: dict[str, Any], failed: bool, words: str) -> None:
    sentence, fails = check_random_pairs.verdict([record])
    assert (fails, words in sentence) == (failed, True)


@pytest.mark.slow
def test_a_pair_is_compared_in_both_formats_and_in_float32(tmp_path: Path) -> None:
    result = CliRunner().invoke(check_random_pairs.main, ["--first", "6001", "--count", "1", "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "out").read_text())
    assert {engine: texts["different"] for engine, texts in record["texts"].items()} == {"llama": [], "onnx": []}
    _, target, drafter = write_random_pair(6001, tmp_path)
    for figures in (record["figures"], check_random_pairs.in_float32(target, drafter, tmp_path)):
        assert figures["onnx"]["mean_kl"] < 1e-9
        assert figures["onnx"]["drafts"] == 1
        assert figures["llama"]["mean_kl"] < 1e-5
