"""What is installed: versions, device packages, which `edge-export package` makes, and what to do where something is missing."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from edge_devices.errors import DeviceError
from edge_devices.files.limited_read import read_at_most, sha256_of

NAME = "package.json"
SCHEMA = 2  # 2: the launchers call edge_devices.entry_points
LAUNCHERS = ("bin/edge-python", "bin/edge-bench")
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class DevicePackage:
    """A device package.

    `platform` is android-arm64, linux-arm64 or linux-x64. `files` holds size and sha256 of each file by path. `backends` are those of llama
    and onnx that it has; () if unknown. `row_kernels` are the variants of the kernels in it. `command` made the package. For each extra of
    edge-mtp, `additions` has the option of that command which adds it; "" means that it should be there already.
    """

    folder: Path
    platform: str
    files: Mapping[str, tuple[int, str]]
    backends: tuple[str, ...] = ()
    row_kernels: tuple[str, ...] = ()
    command: str = ""
    additions: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The total size of all files."""
        return sum(size for size, _ in self.files.values())

    def missing(self) -> list[str]:
        """Returns the paths of files that are missing or have another size than listed."""
        there = {name: self.folder / name for name in (*self.files, *LAUNCHERS)}
        sizes = {name: file.stat().st_size if file.is_file() else None for name, file in there.items()}
        return [name for name, size in sizes.items() if size is None or size != self.files.get(name, (size,))[0]]

    def changed(self) -> list[str]:
        """Returns the paths of files that are missing or changed. Raises OSError if a file cannot be read."""
        missing = self.missing()
        return missing + [
            name for name, (_, digest) in self.files.items() if name not in missing and sha256_of(self.folder / name) != digest
        ]


def read_package(folder: Path) -> DevicePackage:
    """Reads a package's list of files, and checks that each exists with its size. Raises DeviceError otherwise."""
    package = _listed(folder)
    for name in package.missing():
        size = f" or is not {package.files[name][0]} bytes long" if name in package.files else ""
        raise DeviceError(f"{folder / name} is missing{size}; build the package again")
    return package


def _listed(folder: Path) -> DevicePackage:
    path = folder / NAME
    try:
        record = json.loads(read_at_most(path, _MAX_BYTES).decode())
        if record["schema"] != SCHEMA:
            raise DeviceError(
                f"{path} has schema {str(record['schema'])[:40]}; this version reads {SCHEMA}: build the package again with this version"
            )
        return DevicePackage(
            folder=folder,
            platform=str(record["platform"]),
            files={str(file["path"]): (int(file["bytes"]), str(file["sha256"])) for file in record["files"]},
            backends=tuple(map(str, record.get("backends", ()))),
            row_kernels=tuple(map(str, record.get("row_kernels", ()))),
            command=str(record.get("command", "")),
            additions={str(extra): str(option) for extra, option in record.get("additions", {}).items()},
        )
    except OSError as error:
        raise DeviceError(f"{folder} is not a device package ({error.strerror}); build one with edge-export package") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DeviceError(f"{path} cannot be read ({error!r}); build the package again") from error


@cache
def this_package() -> DevicePackage | None:
    """Returns the package whose Python runs this; None outside a package. Raises DeviceError if its list cannot be read."""
    folder = Path(sys.prefix)
    return _listed(folder) if (folder / NAME).is_file() and (folder / LAUNCHERS[0]).is_file() else None


def how_to_get(*extras: str) -> str:
    """Returns advice, as a part of a sentence, for a missing or unsuitable library that one of these extras of edge-mtp installs."""
    package = this_package()
    if package is None:
        return "pip install " + " or ".join(f"'edge-mtp[{extra}]'" for extra in extras)
    options = [package.additions[extra] for extra in extras if extra in package.additions]
    if not options:
        return "no device package holds it: do this where edge-mtp is installed by pip"
    return "this is a device package: make it anew, where it was made, with " + " or ".join(
        dict.fromkeys(f"{package.command} {option}".strip() for option in options)
    )


def installed_version(distribution: str) -> str | None:
    """Returns the version of an installed distribution, None if it is not installed."""
    from importlib import metadata  # a child that decodes an image needs the rest of this module, and not what this imports

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
