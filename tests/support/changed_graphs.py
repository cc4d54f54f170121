"""The nodes of graphs, and bundles whose graphs are others than their export wrote."""

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
    """Returns a copy of a bundle whose graphs, or those of these roles, are what `change` makes of them; hashes are the new ones'."""
    import onnx

    shutil.copytree(folder, output)
    manifest = json.loads((output / "manifest.json").read_text())
    for entry in manifest["files"]:
        if entry["format"] == "onnx" and (not roles or entry["role"] in roles):
            path = output / entry["path"]
            path.write_bytes(change(onnx.load(path, load_external_data=False)).SerializeToString())
            entry |= {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    (output / "manifest.json").write_text(with_hash(manifest))
    return output


def of_an_earlier_version(model: Any) -> Any:
    """The graph with stock operators alone, as before graphs named the kernels' operators."""
    from onnx import inliner

    plain = inliner.inline_local_functions(model)
    with_initializers(plain.graph)
    return plain


def with_initializers(graph: Any) -> None:
    """Has a graph and those inside hold what their Constants give."""
    for node in list(graph.node):
        for attribute in node.attribute:
            if attribute.HasField("g"):
                with_initializers(attribute.g)
        if node.op_type == "Constant":
            graph.initializer.add().CopyFrom(node.attribute[0].t)
            graph.initializer[-1].name = node.output[0]
            graph.node.remove(node)
