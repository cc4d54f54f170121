"""The cost curve of a backend: one of them in a process."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

from click.testing import CliRunner

import bench_row_kernels
from bench_row_kernels import backend_of, main, open_sides
from edge_runtime.backends.kernels.loader import VARIABLE


def bundle(*kinds: str) -> Any:
    return SimpleNamespace(folder="there", has=lambda _, kind: kind in kinds)


def test_the_only_backend_is_measured() -> None:
    assert backend_of(bundle("gguf"), None) == "llama.cpp"
    assert backend_of(bundle("gguf", "onnx"), "onnxruntime") == "onnxruntime"


def test_two_backends_are_not_measured_in_one_process() -> None:
    with pytest.raises(click.UsageError, match="add --backend onnxruntime or llama"):
        backend_of(bundle("gguf", "onnx"), None)


def test_a_backend_whose_format_is_missing_is_refused() -> None:
    with pytest.raises(click.UsageError, match="there has no target for onnxruntime"):
        backend_of(bundle("gguf"), "onnxruntime")


def test_the_variant_that_was_asked_for_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "avx2")
    monkeypatch.setattr(bench_row_kernels, "pair_of", lambda *_, **__: None)
    monkeypatch.setattr(bench_row_kernels, "open_pair", lambda *_: [os.environ[VARIABLE]])
    assert open_sides(bundle("onnx"), "onnxruntime", 1, repack=True) == {"onnxruntime": "none", "onnxruntime with row kernels": "avx2"}


def test_numbers_of_rows_that_cannot_be_compared_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_row_kernels, "variant", lambda: "avx2")
    for rows in ("2,4", "1,14", "1,x", ""):
        result = CliRunner().invoke(main, [str(tmp_path), "--rows", rows])
        assert result.exit_code == 2
        assert "give numbers from 1 to 13, the first one 1" in result.output
