"""The runtime opens graphs of exactly the operators that the exporter writes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import edge_export
from edge_runtime.bundle.onnx_graph import CONTRIB_OPS, ONNX_OPS

SOURCES = sorted(Path(edge_export.__file__).parent.glob("onnx/**/*.py"))


def written() -> Iterator[tuple[bool, str]]:
    """(whether a contrib one, its name) of each operator that a call of `op` or `ops` names."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("op", "ops") and node.args:
                named = node.args[0]
                if isinstance(named, ast.Constant) and isinstance(named.value, str):
                    yield any(word.arg == "domain" for word in node.keywords), named.value


@pytest.mark.parametrize(("contrib", "known"), [(False, ONNX_OPS), (True, CONTRIB_OPS)])
def test_what_the_exporter_writes_is_what_the_runtime_opens(contrib: bool, known: frozenset[str]) -> None:
    assert {name for own, name in written() if own == contrib} == known
