"""The packages edge_runtime and edge_devices as they are imported here, and the metadata with their version."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from edge_export.device_package.inventory import Component, keep_licence
from edge_export.device_package.platforms import SITE, Platform
from edge_export.device_package.wheels import DISTRIBUTION, own_licence
from edge_export.errors import PackageError
from edge_runtime.backends.kernels.build import TARGETS, build

_LIGHT = ("edge_bench", "edge_runtime", "edge_devices")


# The kernels that are compiled here are for this machine; their sources are not needed on a device.
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "libedge_rows.*", "*.cpp", "*.h")


def add_own_code(folder: Path, platform: Platform) -> Component:
    """Copies edge_runtime and edge_devices, nothing of the exporter, and compiles the row kernels. Raises PackageError."""
    for name in _LIGHT:
        shutil.copytree(str(files(name)), folder / SITE / name, ignore=_LEFT_OUT)
    _add_kernels(folder / SITE / "edge_runtime" / "backends" / "kernels" / "lib", platform)
    found = version(DISTRIBUTION)
    about = folder / SITE / f"{DISTRIBUTION.replace('-', '_')}-{found}.dist-info"
    about.mkdir()
    # Commands read the version from the distribution's metadata; the rest of it describes the exporter.
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {found}\n", encoding="utf-8")
    text = keep_licence(folder, f"{DISTRIBUTION}/LICENSE", own_licence())
    return Component(name=DISTRIBUTION, version=found, source="this program", licence="Apache-2.0", texts=(text,))


def _add_kernels(folder: Path, platform: Platform) -> None:
    """Without zig's compiler the device runs stock operators, as a package for onnxruntime alone needs no compiler."""
    target = TARGETS.get(("Linux", platform.machine))
    if target is None or find_spec("ziglang") is None:
        return
    try:
        build(target, folder)
    except (RuntimeError, OSError) as error:
        raise PackageError(f"the row kernels cannot be built for {platform.name} ({error}); report this error") from error
