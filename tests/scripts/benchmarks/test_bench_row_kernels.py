"""The cost curve of a backend: one of them in a process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import click
import pytest

pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")


from bench_row_kernels import backend_of


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
