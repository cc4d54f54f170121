"""Reads the device package that `edge-export package` builds: a folder with its own Python, the runtime and launchers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from edge_devices.files.limited_read import read_at_most
from edge_runtime.errors import RequestError

SCHEMA = 2  # 2: the launchers call edge_devices.entry_points
NAME = "package.json"
MAX_BYTES = 16 << 20
LAUNCHERS = ("bin/edge-python", "bin/edge-bench")


@dataclass(frozen=True, kw_only=True)
class DevicePackage:
    """A package: `platform` is android-arm64, linux-arm64 or linux-x64."""

    folder: Path
    platform: str
    bytes: int


def read_package(folder: Path) -> DevicePackage:
    """Reads a package's list of files and checks that each exists with its size. Raises RequestError for anything else."""
    path = folder / NAME
    try:
        record = json.loads(read_at_most(path, MAX_BYTES).decode())
        if record["schema"] != SCHEMA:
            raise RequestError(
                f"{path} has schema {str(record['schema'])[:40]}; this version reads {SCHEMA}: build the package again with this version"
            )
        files = {str(file["path"]): int(file["bytes"]) for file in record["files"]}
        platform = str(record["platform"])
    except OSError as error:
        raise RequestError(f"{folder} is not a device package ({error.strerror}); build one with edge-export package") from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise RequestError(f"{path} cannot be read ({error!r}); build the package again") from error
    for name, size in files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            raise RequestError(f"{file} is missing or is not {size} bytes long; build the package again")
    for name in LAUNCHERS:
        if not (folder / name).is_file():
            raise RequestError(f"{folder / name} is missing; build the package again")
    return DevicePackage(folder=folder, platform=platform, bytes=sum(files.values()))
