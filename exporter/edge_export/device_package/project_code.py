"""The packages edge_runtime and edge_devices as they are imported here, and the metadata with their version."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from edge_export.device_package.inventory import Component, keep_licence
from edge_export.device_package.platforms import SITE
from edge_export.device_package.wheels import DISTRIBUTION, own_licence

_LIGHT = ("edge_runtime", "edge_devices")


def add_own_code(folder: Path) -> Component:
    """Copies edge_runtime and edge_devices; nothing of the exporter."""
    for name in _LIGHT:
        shutil.copytree(str(files(name)), folder / SITE / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    found = version(DISTRIBUTION)
    about = folder / SITE / f"{DISTRIBUTION.replace('-', '_')}-{found}.dist-info"
    about.mkdir()
    # Commands read the version from the distribution's metadata; the rest of it describes the exporter.
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {found}\n", encoding="utf-8")
    text = keep_licence(folder, f"{DISTRIBUTION}/LICENSE", own_licence())
    return Component(name=DISTRIBUTION, version=found, source="this program", licence="Apache-2.0", texts=(text,))
