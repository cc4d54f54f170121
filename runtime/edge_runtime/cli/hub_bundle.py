"""The bundle of a hub name, such as google/gemma-4-E2B-it: exported once into the user's cache by `edge-export`, after asking the user."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click

from edge_devices.files.user_cache import cache_folder
from edge_runtime.bundle.bundle import hub_repository
from edge_runtime.bundle.manifest import MANIFEST_NAME

# The exporter is a package of its own, which this one does not import.
_EXPORT = (sys.executable, "-P", "-c", "from edge_devices.entry_points import edge_export; edge_export()")


def hub_bundle(name: Path) -> Path:
    """Returns the folder of the bundle made of a hub name; `name` itself where it is a path, or where nobody is there to ask.

    So it is in a device package, too, which has no exporter.

    On a terminal the plan is shown first: whether it fits this machine, and what it takes. Ends the command if the answer is no, or
    with the exit code of a failed export.
    """
    if name.exists() or hub_repository(str(name)) is None:
        return name
    folder = cache_folder() / "bundles" / re.sub(r"[^\w.@=-]+", "--", str(name).replace(":", "="), flags=re.ASCII)
    if (folder / MANIFEST_NAME).is_file():
        return folder
    if not sys.stdin.isatty() or find_spec("edge_export") is None:
        return name
    click.echo(f"{name} is not here yet. What it would take on this machine:", err=True)
    subprocess.run([*_EXPORT, "plan", str(name)], check=False)
    click.confirm(f"Download {name} with its drafter and make a bundle of it in {folder}?", abort=True, err=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if code := subprocess.run([*_EXPORT, "pair", str(name), "--output", str(folder)], check=False).returncode:
        raise SystemExit(code)
    return folder
