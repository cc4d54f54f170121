"""Bundles that are others than their export wrote, with sizes and hashes that fit; and the nodes of graphs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from edge_devices.files.limited_read import sha256_of
from edge_runtime.bundle.manifest import with_hash


def nodes_of(graph: Any) -> Iterator[Any]:
    """All nodes of a graph, those in Loops and Ifs too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes_of(attribute.g)


def with_graphs(folder: Path, output: Path, change: Callable[[Any], Any], roles: Sequence[str] = ()) -> Path:
    """Returns a copy of a bundle with its graphs, or those of these roles, as `change` leaves or returns them."""
    import onnx

    def changed(data: bytes) -> bytes:
        model = onnx.load_from_string(data)
        return bytes((change(model) or model).SerializeToString())

    shutil.copytree(folder, output)
    put_files(output, changed, lambda file: file["format"] == "onnx" and (not roles or file["role"] in roles))
    return output


def put_files(bundle: Path, change: Callable[[bytes], bytes], which: Callable[[dict[str, Any]], bool]) -> None:
    """Changes the files of a bundle, in place, whose entries in the manifest are those that are meant."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    for entry in filter(which, manifest["files"]):
        path = bundle / entry["path"]
        path.write_bytes(change(path.read_bytes()))
        entry |= {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    (bundle / "manifest.json").write_text(with_hash(manifest))
