"""Bundles that were changed by hand, with sizes and hashes that fit: what somebody may pass on."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge_runtime.bundle.manifest import with_hash


def changed_bundle(
    bundle: Path, folder: Path, *, graph: Callable[[Any], object] | None = None, facts: Callable[[Any], object] | None = None
) -> Path:
    """A copy in `folder`, in which `graph` changed the drafter's ONNX model, and `facts` the manifest."""
    copy = folder / "changed"
    shutil.copytree(bundle, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    if graph is not None:
        import onnx

        entry = next(file for file in manifest["files"] if (file["role"], file["format"]) == ("drafter", "onnx"))
        model = onnx.load(copy / entry["path"], load_external_data=False)
        graph(model)
        data = model.SerializeToString()
        (copy / entry["path"]).write_bytes(data)
        entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if facts is not None:
        facts(manifest)
    (copy / "manifest.json").write_text(with_hash(manifest))
    return copy


def as_bytes(tensor: Any) -> None:
    """Says that a float32 tensor is one of uint8, with as many elements and a quarter of the bytes."""
    tensor.data_type = 2
    for entry in tensor.external_data:
        if entry.key == "length":
            entry.value = str(int(entry.value) // 4)
    tensor.raw_data = tensor.raw_data[: len(tensor.raw_data) // 4]
