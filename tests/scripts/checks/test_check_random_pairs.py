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
from edge_export.errors import ParityError

EQUAL = {"texts": {"llama": {"compared": 8, "equal": 8}, "onnx": {"compared": 8, "equal": 8}}}
REFUSED = {"refused": "parity failed", "float32": {"onnx": {"mean_kl": 1e-12}, "llama": {"mean_kl": 1e-9}}}
WRONG = {"refused": "parity failed", "float32": {"onnx": {"mean_kl": 1e-12}, "llama": {"refused": "parity failed"}}}
OTHER_TEXT = {"texts": EQUAL["texts"] | {"onnx": {"compared": 8, "equal": 7}}}


@pytest.mark.parametrize(
    ("record", "code", "words"),
    [
        (EQUAL, 0, "1 pairs: 0 refused, 0 of them in float32 too; 16 of 16 texts"),
        (EQUAL | REFUSED, 0, "1 refused, 0 of them in float32 too; 16 of 16"),
        (EQUAL | WRONG, 1, "1 refused, 1 of them in float32 too; 16 of 16"),
        (OTHER_TEXT, 1, "0 refused, 0 of them in float32 too; 15 of 16"),
    ],
)
def test_a_pair_off_in_float32_or_another_text_fails(
    record: dict[str, Any], code: int, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(check_random_pairs, "check_pair", lambda seed, _: record | {"seed": seed})
    result = CliRunner().invoke(check_random_pairs.main, ["--first", "7", "--count", "1", "--output", str(tmp_path / "out")])
    assert (result.exit_code, json.loads((tmp_path / "out").read_text())["seed"]) == (code, 7)
    assert words in result.output


@pytest.mark.slow
@pytest.mark.parametrize("refused", [False, True])
def test_a_refused_pair_is_compared_in_float32(refused: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    export = check_random_pairs._export

    def refusing(*arguments: Any, verify: bool) -> dict[str, Any]:
        if verify and refused:
            raise ParityError("parity failed")
        return export(*arguments, verify=verify)

    monkeypatch.setattr(check_random_pairs, "_export", refusing)
    record = check_random_pairs.check_pair(6001, tmp_path)
    assert {engine: texts["different"] for engine, texts in record["texts"].items()} == {"llama": [], "onnx": []}
    figures = record["float32" if refused else "figures"]
    assert figures["onnx"]["mean_kl"] < 1e-9
    assert figures["onnx"]["drafts"] == 1
    assert figures["llama"]["mean_kl"] < 1e-5
