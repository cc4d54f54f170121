"""What tests make once and share, kept under build/test-files by the hash of all that it was made of: exported bundles, tiny checkpoints.

Both workers and the next run find it there. It is read-only for tests.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "exporter" / "edge_export" / "reference_pair"
FOLDER = ROOT / "build" / "test-files"
SOURCES = ("exporter", "runtime", "devices", "tests/support", "tests/data/pictures")
LIBRARIES = ("gguf", "llama-cpp-python", "numpy", "onnx", "onnxruntime", "torch", "transformers")
_WEEK = 7 * 24 * 3600


def kept(name: str, of: dict[str, Any], make: Callable[[Path], object]) -> Path:
    """Returns the file or folder that `make` writes at the path it is given; it is made anew where `of` or the sources changed."""
    key = hashlib.sha256(f"{sources()} {json.dumps(of, sort_keys=True, default=str)}".encode()).hexdigest()
    path = FOLDER / f"{name}-{key[:20]}"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with (FOLDER / f".{name}.lock").open("w") as lock:
            if sys.platform != "win32":
                import fcntl

                fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be making it
            if not path.exists():
                _forget(name)
                with TemporaryDirectory(dir=FOLDER) as scratch:
                    made = Path(scratch) / name
                    make(made)
                    made.rename(path)
    return path


def shipped_bundle(**changes: Any) -> Path:
    """The shipped pair, exported once with these changes of an `ExportRequest`."""
    from edge_export.pipeline.export import export_pair
    from edge_export.pipeline.request import ExportRequest

    values: dict[str, Any] = {"target": str(PAIR / "target"), "drafter": str(PAIR / "drafter"), "context": 1024, "verify": False} | changes
    return kept("bundle", values, lambda output: export_pair(ExportRequest(output=output, **values)))


@cache
def sources() -> str:
    """The hash of everything that makes such files: our sources, and the versions of the libraries."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix not in (".pyc", ".so"):
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    for library in LIBRARIES:
        try:
            digest.update(f"{library} {version(library)}\0".encode())
        except PackageNotFoundError:
            continue
    return digest.hexdigest()


def _forget(name: str) -> None:
    """Removes what sources of more than a week ago have made."""
    for path in FOLDER.glob(f"{name}-*"):
        if path.stat().st_mtime < time.time() - _WEEK:
            shutil.rmtree(path, ignore_errors=True)
