"""The backends there are, and which of them can run a bundle, by its files and the installed libraries; none is imported for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from edge_runtime.backends.interface import Backend, OpenRequest
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.errors import BackendError, BundleError, RequestError

BackendKind = str


@dataclass(frozen=True, kw_only=True)
class BackendCard:
    """What is known of a backend without its code: its name for people, the format of its target's file, and its library's module."""

    title: str
    format: str
    library: str


# A backend is a folder here with an `open.py`, an extra of the package of the same name, and a line, the preferred one first.
CARDS: dict[BackendKind, BackendCard] = {
    "llama": BackendCard(title="llama.cpp", format="gguf", library="llama_cpp"),
    "onnx": BackendCard(title="ONNX Runtime", format="onnx", library="onnxruntime"),
}
BACKENDS = tuple(CARDS)


def load_backend(kind: BackendKind) -> Backend:
    """Imports the code of a backend."""
    backend: Backend = import_module(f"edge_runtime.backends.{kind}.open").BACKEND
    return backend


def usable_backends(bundle: Bundle, wanted: BackendKind | None) -> list[BackendKind]:
    """Returns `wanted`, or all backends whose files are in the bundle and whose library is installed; at least one.

    Raises RequestError for an unknown backend, BundleError if the bundle has no files for it, BackendError if no library is installed.
    """
    if wanted is not None and wanted not in BACKENDS:
        raise RequestError(f"backend {wanted!r} is unknown; choose one of {', '.join(BACKENDS)}")
    held = [kind for kind, card in CARDS.items() if bundle.has("target", card.format)]
    if wanted is not None and wanted not in held:
        format = CARDS[wanted].format
        raise BundleError(f"{bundle.folder} has no {format} target for the {wanted} backend; export it again with --format {format}")
    if not held:
        formats = " nor ".join(card.format for card in CARDS.values())
        raise BundleError(f"{bundle.folder} has neither a {formats} target; export the bundle again")
    candidates = [wanted] if wanted is not None else held
    usable = [kind for kind in candidates if find_spec(CARDS[kind].library) is not None]
    if usable:
        return usable
    missing = " or ".join(f"'edge-mtp[{kind}]'" for kind in candidates)
    raise BackendError(f"no library is installed that runs {bundle.folder}; pip install {missing}")


def fitting_backends(request: OpenRequest, wanted: BackendKind | None) -> list[BackendKind]:
    """Returns the usable backends that have all options of a request. Raises as `usable_backends` and `check_options` do."""
    usable = usable_backends(request.bundle, wanted)
    fitting = [kind for kind in usable if _refusal(kind, request) is None]
    if not fitting:
        check_options(usable[0], request)
    return fitting


def check_options(kind: BackendKind, request: OpenRequest) -> None:
    """Raises RequestError for an option that the backend does not have."""
    if (refusal := _refusal(kind, request)) is not None:
        raise RequestError(refusal)


def _refusal(kind: BackendKind, request: OpenRequest) -> str | None:
    backend, title = load_backend(kind), CARDS[kind].title
    if request.sequences > backend.max_sequences:
        count, most = request.sequences, backend.max_sequences
        return f"{count} sessions at once are more than the {most} that {title} runs; ask for fewer, or for another backend"
    for option, value in request.special_options().items():
        if option not in backend.options:
            return backend.refusal(option, value) or f"{title} has no {option}, which is {value}; leave it out, or {_others_with(option)}"
    return None


def _others_with(option: str) -> str:
    having: Sequence[BackendKind] = [kind for kind in BACKENDS if option in load_backend(kind).options]
    return f"use the {' or '.join(having)} backend"
