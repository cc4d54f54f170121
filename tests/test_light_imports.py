"""Light never imports heavy: each package is imported in a child process, and the heavy libraries must not come along."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = set(
    """
    torch transformers onnx onnxruntime llama_cpp gguf tokenizers rich huggingface_hub jinja2 llguidance starlette
    uvicorn PIL soundfile
    """.split()
)

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("package", ["edge_runtime", "edge_bench", "edge_devices", "edge_export"])
def test_importing_a_package_brings_nothing_heavy(package):
    code = f"import json, sys, {package}; print(json.dumps(sorted(m.split('.')[0] for m in sys.modules)))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    loaded = set(json.loads(child.stdout))
    assert package in loaded
    assert not HEAVY & loaded


@pytest.mark.parametrize("command", ["edge_run", "edge_bench", "edge_export"])
def test_a_list_of_commands_imports_none_of_them(command):
    code = (
        "import sys; sys.argv = ['command', '--help']\n"
        f"from edge_devices.entry_points import {command} as start\n"
        "try: start()\n"
        "finally: print(sorted({'numpy', 'yaml', 'edge_runtime.session.open', *HEAVY} & set(sys.modules)))"
    ).replace("*HEAVY", f"*{HEAVY}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert "Commands:" in child.stdout
    assert child.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("package", ["edge_runtime", "edge_devices", "edge_export"])
def test_public_names_exist(package):
    module = importlib.import_module(package)
    assert [n for n in module.__all__ if not hasattr(module, n)] == []


@pytest.mark.parametrize("package", ["exporter/edge_export", "runtime/edge_runtime", "runtime/edge_bench", "devices/edge_devices"])
def test_one_heavy_library_has_one_importing_module(package):
    importers: dict[str, set[str]] = {}
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            for name in names:
                importers.setdefault(name.split(".")[0], set()).add(path.relative_to(ROOT / package).as_posix())
    # Calibration, tuning and the encoders' parity run the same reference models as parity, for other purposes.
    for library in ("torch", "transformers"):
        others = {"quantization/calibration.py", "quantization/measured_layers.py", "parity/comparison.py"}
        importers.get(library, set()).difference_update(others)
        importers[library] = {path for path in importers.get(library, set()) if path != "tuning.py"}
    shared = {library: sorted(files) for library, files in importers.items() if library in HEAVY - {"rich"} and len(files) > 1}
    assert shared == {}
