"""The layout of the repository: short files, distinct names, no import circles in scripts, contracts that cover every module."""

from __future__ import annotations

import ast
import graphlib
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    ROOT / "exporter" / "edge_export",
    ROOT / "runtime" / "edge_runtime",
    ROOT / "runtime" / "edge_bench",
    ROOT / "devices" / "edge_devices",
)
MAX_LINES = 600
SCRIPTS = sorted(path for path in (ROOT / "scripts").iterdir() if path.is_dir() and path.name != "__pycache__")


def python_files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def imported(path: Path) -> set[str]:
    """The names of all modules that a file imports, anywhere in it; `from a import b` may import a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("folder", ["exporter", "runtime", "devices", "scripts", "tests", "examples"])
def test_files_are_short(folder: str) -> None:
    lines = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in python_files(ROOT / folder)}
    assert lines
    assert {path: count for path, count in lines.items() if count > MAX_LINES} == {}


def test_public_classes_have_distinct_names() -> None:
    nodes = (node for package in PACKAGES for path in python_files(package) for node in ast.parse(path.read_text(encoding="utf-8")).body)
    counts = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("folder", SCRIPTS, ids=lambda path: path.name)
def test_scripts_have_no_import_circles(folder: Path) -> None:
    """Imports inside functions count too; for the packages, the import contracts check it."""
    modules = {".".join(path.relative_to(folder).with_suffix("").parts): path for path in python_files(folder)}
    graph = {name: imported(path) & modules.keys() - {name} for name, path in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_import_contracts_cover_every_module() -> None:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    assert configuration["root_packages"] == [path.name for path in PACKAGES]
    layers = [contract for contract in configuration["contracts"] if contract["type"] == "layers" and "containers" in contract]
    assert {container for contract in layers for container in contract["containers"]} >= {path.name for path in PACKAGES}
    assert [contract["id"] for contract in layers if not contract.get("exhaustive")] == []
