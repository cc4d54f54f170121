"""A GPU for tests: SwiftShader, the Vulkan driver inside of Debian's chromium package, which computes on the processor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import edge_runtime

_FOLDER = Path(os.environ.get("EDGE_MTP_SWIFTSHADER", "/usr/lib/chromium"))
_DRIVER = _FOLDER / "libvk_swiftshader.so"
_ROOT = Path(edge_runtime.__file__).parents[2]


def lacking() -> str:
    """Returns what is missing to run WebGPU on it; empty if nothing is."""
    if find_spec("onnxruntime_ep_webgpu") is None:
        return "needs edge-mtp[webgpu]"
    return "" if _DRIVER.is_file() else f"needs SwiftShader at {_DRIVER} (apt install chromium)"


def environment(folder: Path) -> dict[str, str]:
    """What a process needs in its environment whose only GPU it is."""
    manifest = folder / "swiftshader.json"
    manifest.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": {"library_path": str(_DRIVER), "api_version": "1.3.0"}}))
    return {"VK_ICD_FILENAMES": str(manifest), "LD_LIBRARY_PATH": str(_FOLDER), "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1"}


def run_on_it(script: str, *arguments: str, folder: Path) -> Any:
    """Runs a script in a process whose only GPU it is; returns the JSON in its last line."""
    paths = [str(_ROOT / name) for name in ("exporter", "runtime", "devices", "tests/support")]
    own = {"PYTHONPATH": os.pathsep.join([*paths, *sys.path]), "EDGE_MTP_CACHE": str(folder)}
    command = [sys.executable, "-c", script, *arguments]
    everything = os.environ | environment(folder) | own
    result = subprocess.run(command, cwd=folder, env=everything, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
