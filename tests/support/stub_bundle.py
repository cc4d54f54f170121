"""A bundle that opens, with a file of zeros in place of a model: what is sent where nothing decodes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from edge_runtime.bundle.manifest_checks import with_hash

MANIFEST = Path(__file__).parent.parent / "data" / "manifest-2.json"


def stub_bundle(folder: Path, size: int = 100_000) -> Path:
    """Writes the bundle with a target of `size` bytes into a new folder and returns the folder."""
    folder.mkdir(parents=True)
    (folder / "target.gguf").write_bytes(bytes(size))
    data = json.loads(MANIFEST.read_text())
    data["files"] = [{**data["files"][0], "bytes": size, "sha256": hashlib.sha256(bytes(size)).hexdigest()}]
    (folder / "manifest.json").write_text(with_hash(data))
    return folder
