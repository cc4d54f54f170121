"""Readers of what an ONNX bundle says of itself, down to the drafts: its manifest, and the graph whose weights the kernels' drafter takes.

Native code gets its arrays in front of pages that cannot be touched.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from edge_runtime.backends.onnx.drafter import KernelDrafter, OtherGraphError, load_draft
from edge_runtime.backends.onnx.open import open_pair
from edge_runtime.backends.onnx.target import OrtOptions, OrtTarget, pair_of
from edge_runtime.bundle.bundle import Bundle, open_bundle
from edge_runtime.bundle.onnx_graph import check_onnx
from edge_runtime.errors import BackendError
from edge_runtime.session.load_options import LoadOptions
from edge_runtime.session.open import open_session
from fuzzing.guarded import guarded_arrays
from fuzzing.meaning import changed_graph, changed_manifest
from fuzzing.readers import Read, Reader
from fuzzing.runtime_readers import hashed

_CONTEXT, _PROMPT, _DRAFTS = 128, [5, 6, 7, 8], 3


def _copy(bundle: Bundle, folder: Path) -> Bundle:
    return open_bundle(shutil.copytree(bundle.folder, folder / "bundle"))


def _drafter(folder: Path, bundle: Bundle) -> Read:
    """The graph's weights, handed to the kernels' drafter, and drafts with them behind a sound target."""
    opened = _copy(bundle, folder)
    files = pair_of(opened, drafter=True)
    # Kept open for the whole campaign: the process ends with it.
    target, _ = open_pair(files, OrtOptions(context=_CONTEXT, threads=1))
    assert isinstance(target, OrtTarget)
    target.prefill(_PROMPT)
    path = opened.folder / opened.file("drafter", "onnx").path
    names = {file.path for file in opened.manifest.files}

    def read(data: bytes) -> None:
        path.write_bytes(data)
        check_onnx(path, names)
        with guarded_arrays():
            try:
                drafter = KernelDrafter(path, target, files.layout, load_draft(path, files.layout, target.hidden_size, 1))
            except (OtherGraphError, ValueError) as error:  # onnxruntime gets this graph
                raise BackendError(f"refused: {type(error).__name__}") from error
            drafter.draft(_PROMPT[-1], _DRAFTS)
            target.closers.remove(drafter)
            drafter.close()

    return read


def _graph(bundle: Bundle) -> Sequence[bytes]:
    return [bundle.path("drafter", "onnx").read_bytes()]


def _bundle(folder: Path, bundle: Bundle) -> Read:
    """A whole bundle that is opened to continue a text."""
    copy = _copy(bundle, folder).folder

    def read(data: bytes) -> None:
        (copy / "manifest.json").write_bytes(hashed(data))
        with guarded_arrays(), open_session(copy, LoadOptions(backend="onnx", check="none", threads=1)) as session:
            session.generate(_PROMPT, max_tokens=4, draft_length=_DRAFTS).text()

    return read


def _manifest(bundle: Bundle) -> Sequence[bytes]:
    return [(bundle.folder / "manifest.json").read_bytes()]


READERS = (
    Reader(name="onnx-drafter", make=_drafter, needs="graphs", seeds=_graph, by_meaning=changed_graph, memory_factor=200.0),
    Reader(
        name="bundle-facts",
        make=_bundle,
        needs="graphs",
        seeds=_manifest,
        by_meaning=changed_manifest,
        structured=True,
        memory_factor=4000.0,  # of a manifest; the graphs' arrays are the same for all
        guarded=False,  # the whole program opens files of its own
    ),
)
