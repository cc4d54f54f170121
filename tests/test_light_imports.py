"""Light never imports heavy: each package is imported in a child process, and the heavy libraries must not come along."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "onnxruntime", "llama_cpp", "gguf", "tokenizers", "rich", "huggingface_hub"}


@pytest.mark.parametrize("package", ["edge_runtime", "edge_devices", "edge_export"])
def test_importing_a_package_brings_nothing_heavy(package):
    code = f"import json, sys, {package}; print(json.dumps(sorted(m.split('.')[0] for m in sys.modules)))"
    loaded = set(json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout))
    assert package in loaded
    assert not HEAVY & loaded


def test_public_names_exist():
    import edge_runtime

    assert [n for n in edge_runtime.__all__ if not hasattr(edge_runtime, n)] == []
