"""Moves the pin of llama-cpp-python or onnxruntime to another release, in every file that names it.

    python scripts/setup/move_pin.py onnxruntime 1.32.0 --keep-older
    python scripts/setup/move_pin.py llama-cpp-python 0.3.37

What has to be run before and after: scripts/README.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import click

# The module with FIRST_VERSION and END_VERSION, how many numbers of a version they have, and files with the version itself.
PINS = {
    "llama-cpp-python": ("runtime/edge_runtime/backends/llama/loader.py", 3, ("exporter/edge_export/device_package/native_libraries.py",)),
    "onnxruntime": ("runtime/edge_runtime/backends/onnx/devices.py", 2, ()),
}


def move(root: Path, library: str, version: str, *, keep_older: bool) -> list[str]:
    """Rewrites the files below `root`; returns their names. Raises ClickException if a place is not found."""
    module, digits, others = PINS[library]
    first = tuple(int(part) for part in version.split("."))[:digits]
    end = (*first[:-1], first[-1] + 1)
    until = ".".join(map(str, end))
    oldest = r"\1" if keep_older else version
    changes = [
        ("pyproject.toml", rf'"{library}>=([0-9.]+),<[0-9.]+"', rf'"{library}>={oldest},<{until}"'),
        (module, r"^END_VERSION = \(.*\)$", f"END_VERSION = {end}"),
        *((name, r'^VERSION = "[0-9.]+"$', f'VERSION = "{version}"') for name in others),
    ]
    if not keep_older:
        changes.append((module, r"^FIRST_VERSION = \(.*\)$", f"FIRST_VERSION = {first}"))
    for name, pattern, text in changes:
        before = (root / name).read_text(encoding="utf-8")
        after, count = re.subn(pattern, text, before, flags=re.MULTILINE)
        if not count:
            raise click.ClickException(f"{name} has no line like {pattern}; change it by hand, and this script with it")
        (root / name).write_text(after, encoding="utf-8")
    return sorted({name for name, _, _ in changes})


@click.command(context_settings={"show_default": True})
@click.argument("library", type=click.Choice(list(PINS)))
@click.argument("version")
@click.option("--keep-older", is_flag=True, help="Admit the versions before it too, as far as they are admitted now.")
def main(library: str, version: str, keep_older: bool) -> None:
    """Pin LIBRARY to VERSION in the checkout that is the current folder."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise click.UsageError(f"{version!r} is no version; give three numbers, such as 1.32.0")
    for name in move(Path(), library, version, keep_older=keep_older):
        click.echo(name)


if __name__ == "__main__":
    main()
