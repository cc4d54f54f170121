"""Selects the backend of a bundle by its files and the installed libraries, without importing them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, get_args

from edge_runtime.bundle.bundle import Bundle
from edge_runtime.errors import BackendError, BundleError, RequestError

BackendKind = Literal["llama", "onnx"]
BACKENDS: tuple[BackendKind, ...] = get_args(BackendKind)
_FORMAT: dict[BackendKind, str] = {"llama": "gguf", "onnx": "onnx"}
LIBRARY: dict[BackendKind, str] = {"llama": "llama_cpp", "onnx": "onnxruntime"}


def choose_backend(bundle: Bundle, wanted: BackendKind | None) -> BackendKind:
    """Returns `wanted`, or the first backend of BACKENDS that `usable_backends` has; raises as it does."""
    return usable_backends(bundle, wanted)[0]


def usable_backends(bundle: Bundle, wanted: BackendKind | None) -> list[BackendKind]:
    """Returns `wanted`, or all backends whose files are in the bundle and whose library is installed; at least one.

    Raises RequestError for an unknown backend, BundleError if the bundle has no files for it, BackendError if no library is installed.
    """
    if wanted is not None and wanted not in BACKENDS:
        raise RequestError(f"backend {wanted!r} is unknown; choose one of {', '.join(BACKENDS)}")
    held = [kind for kind in BACKENDS if bundle.has("target", _FORMAT[kind])]
    if wanted is not None and wanted not in held:
        raise BundleError(
            f"{bundle.folder} has no {_FORMAT[wanted]} target for the {wanted} backend; export it again with --format {_FORMAT[wanted]}"
        )
    if not held:
        raise BundleError(f"{bundle.folder} has neither a gguf nor an onnx target; export the bundle again")
    usable = [kind for kind in ([wanted] if wanted is not None else held) if find_spec(LIBRARY[kind]) is not None]
    if usable:
        return usable
    missing = " or ".join(f"'edge-mtp[{kind}]'" for kind in ([wanted] if wanted is not None else held))
    raise BackendError(f"no library is installed that runs {bundle.folder}; pip install {missing}")
