"""A device package: its list of files, and what is advised where something is missing, inside one and elsewhere."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_devices.errors import DeviceError
from edge_devices.machine.device_package import how_to_get, read_package, this_package

COMMAND = "edge-export package linux-arm64 -o FOLDER --backend onnx"
LISTED = {
    "schema": 2,
    "platform": "linux-arm64",
    "backends": ["onnx"],
    "row_kernels": ["neon", "dotprod"],
    "command": COMMAND,
    "additions": {"onnx": "", "serve": "", "llama": "--backend llama", "media": "--with-media"},
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Returns a function that makes this program one of a package whose list has these changes."""
    this_package.cache_clear()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    files = []
    for name in ("bin/edge-python", "bin/edge-bench", "lib/a.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
        files.append({"path": name, "bytes": len(name), "sha256": hashlib.sha256(name.encode()).hexdigest(), "executable": False})

    def make(**changes: Any) -> Path:
        (tmp_path / "package.json").write_text(json.dumps({**LISTED, "files": files, **changes}))
        return tmp_path

    yield make
    this_package.cache_clear()


def test_outside_of_a_package_pip_installs_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert this_package() is None
    assert how_to_get("serve") == "pip install 'edge-mtp[serve]'"
    assert how_to_get("webgpu", "openvino") == "pip install 'edge-mtp[webgpu]' or 'edge-mtp[openvino]'"


@pytest.mark.parametrize(
    ("extras", "advice"),
    [
        (["serve"], f"with {COMMAND}"),
        (["llama"], f"with {COMMAND} --backend llama"),
        (["onnx", "llama"], f"with {COMMAND} or {COMMAND} --backend llama"),
        (["media"], f"with {COMMAND} --with-media"),
        (["sign"], "no device package holds it: do this where edge-mtp is installed by pip"),
        (["webgpu", "qnn"], "no device package holds it: do this where edge-mtp is installed by pip"),
    ],
)
def test_inside_another_package_is_made(extras: list[str], advice: str, package: Callable[..., Path]) -> None:
    package()
    assert how_to_get(*extras).endswith(advice)
    assert "pip install" not in how_to_get(*extras)


def test_files_that_are_missing_or_changed_are_named(package: Callable[..., Path]) -> None:
    folder = package()
    read = read_package(folder)
    assert (read.platform, read.backends, read.row_kernels, read.bytes) == ("linux-arm64", ("onnx",), ("neon", "dotprod"), 37)
    assert read.changed() == []
    (folder / "lib/a.py").write_text("LIB/A.PY")
    assert (read.missing(), read.changed()) == ([], ["lib/a.py"])
    (folder / "lib/a.py").write_text("longer than before")
    assert (read.missing(), read.changed()) == (["lib/a.py"], ["lib/a.py"])
    with pytest.raises(DeviceError, match=r"lib/a\.py is missing or is not 8 bytes long; build the package again"):
        read_package(folder)
    (folder / "bin/edge-bench").unlink()
    assert {*read.missing()} == {"bin/edge-bench", "lib/a.py"}


@pytest.mark.parametrize("changes", [{"schema": 3}, {"files": [{}]}, {"files": 3}, {"additions": []}, {"additions": 3}, {"platform": None}])
def test_a_list_that_cannot_be_read_is_one_sentence(changes: dict[str, Any], package: Callable[..., Path]) -> None:
    folder = package(**changes)
    if changes == {"platform": None}:
        (folder / "package.json").write_text("{")
    with pytest.raises(DeviceError, match="build the package again"):
        how_to_get("serve")
    with pytest.raises(DeviceError, match="build the package again"):
        read_package(folder)


def test_a_launcher_is_asked_for_where_no_list_names_it(package: Callable[..., Path]) -> None:
    folder = package(files=[])
    (folder / "bin/edge-bench").unlink()
    with pytest.raises(DeviceError, match="bin/edge-bench is missing; build the package again"):
        read_package(folder)
