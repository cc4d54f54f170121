"""Compares the next-token distributions of bundles, on each engine that runs them, with those of a checkpoint or another bundle."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from edge_bench.measure.request import threads_option
from edge_devices.children import import_paths, limited_command, run_child
from edge_devices.machine.device_package import how_to_get, installed_version
from edge_devices.option_fields import option
from edge_devices.waiting import Report
from edge_runtime.backends.selection import BACKENDS, CARDS, BackendKind, usable_backends
from edge_runtime.bundle.bundle import Bundle, open_bundle
from edge_runtime.bundle.manifest import Manifest
from edge_runtime.decoding.quality import (
    KINDS,
    ROWS_PER_FORWARD,
    ReferenceText,
    RowFigures,
    held_out_text,
    joined,
    read_reference,
    row_figures,
    text_rows,
    write_reference,
)
from edge_runtime.errors import BundleError, RequestError
from edge_runtime.interfaces import Logits
from edge_runtime.session.load_options import LoadOptions
from edge_runtime.session.open import default_threads, open_session
from edge_runtime.session.session import Session

# The options of `LoadOptions` that `edge-bench quality` takes.
QUALITY_LOADING = ("check", "public_key")
_TARGET_ROLES = ("target", "embedding", "per_layer_embedding")
# The module of edge-export that writes a checkpoint's logits. It runs in a child process, because its package cannot be imported here.
_CHECKPOINT_MODULE = "edge_export.parity.reference"


@dataclass(frozen=True, kw_only=True)
class QualityRequest:
    """What to compare bundles with, and on how much text."""

    checkpoint: str | None = option(
        panel="Measure", metavar="SOURCE", help="Compare with this checkpoint, a folder or hub name, in float32. Needs edge-mtp[verify]."
    )
    against: Path | None = option(
        panel="Measure", metavar="BUNDLE", help="Compare with this bundle, such as one exported with --target-quant f16."
    )
    tokens: int = option(
        default=384,
        low=32,
        high=1024,
        panel="Measure",
        help="Tokens of each of the three texts; a token takes 4 bytes times the size of the vocabulary in temporary files.",
    )
    backend: BackendKind | None = option(
        "-b", choices=BACKENDS, panel="Backend", help="Engine to run on.  [default: each that a bundle has files for]"
    )
    threads: int | None = threads_option()

    def __post_init__(self) -> None:
        """Raises a usage error unless there is exactly one reference."""
        if (self.checkpoint is None) == (self.against is None):
            raise click.UsageError("quality compares with something: give --checkpoint SOURCE or --against BUNDLE, one of them")


@dataclass(frozen=True, kw_only=True)
class BundleQuality:
    """One bundle on one engine, compared with the reference. `target_bytes` is the size of the target's files; `texts` is by kind of text.

    `bundle` is the path as the user gave it.
    """

    bundle: str
    backend: BackendKind
    quantization: str
    target_bytes: int
    texts: dict[str, RowFigures]

    @property
    def overall(self) -> RowFigures:
        """The figures of all texts together."""
        return joined(self.texts)

    @property
    def label(self) -> str:
        """The bundle, its quantization and the engine."""
        return f"{self.bundle}, {self.quantization}, {CARDS[self.backend].title}"

    def to_json(self) -> dict[str, Any]:
        """Returns the figures of all texts together, and of each."""
        facts = {"bundle": self.bundle, "backend": self.backend, "quantization": self.quantization, "target_bytes": self.target_bytes}
        texts = {kind: _figures(rows) for kind, rows in self.texts.items()}
        return {**facts, **_figures(self.overall), "texts": texts}


def _figures(rows: RowFigures) -> dict[str, float]:
    return {**asdict(rows.quality), "kl_error": rows.kl_error}


@dataclass(frozen=True, kw_only=True)
class QualityResult:
    """All bundles, compared with one reference. `warnings` names bundles that were made from other weights than the reference."""

    reference: str
    engines: dict[str, str]
    bundles: tuple[BundleQuality, ...]
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the record of `--json`."""
        bundles = [each.to_json() for each in self.bundles]
        return {"reference": self.reference, "engines": self.engines, "warnings": list(self.warnings), "bundles": bundles}


def measure_quality(bundles: Sequence[Path], request: QualityRequest, load: LoadOptions) -> QualityResult:
    """Compares each bundle with the reference, on the requested engine or on each engine that runs it.

    Temporary files take 4 bytes x vocabulary x 3 x `request.tokens`. Raises EdgeError.
    """
    load = replace(load, backend=request.backend, threads=request.threads or default_threads())
    plans = [(folder, kind) for folder in bundles for kind in _backends(folder, load)]
    warnings = tuple(text for folder in bundles if (text := _other_model(folder, request)) is not None)
    for text in warnings:
        load.notify(f"Warning: {text}")
    with tempfile.TemporaryDirectory(prefix="edge-mtp-") as scratch:
        folder = Path(scratch)
        with load.waiting("reference") as report:
            if request.against is not None:
                reference = _write_bundle(request.against, folder, request.tokens, load, report)
            else:
                assert request.checkpoint is not None  # the request has exactly one reference
                reference = _write_checkpoint(request.checkpoint, folder, request.tokens, load, report)
        texts = {kind: read_reference(folder, kind) for kind in KINDS}
        measured = tuple(_compared(path, kind, texts, reference, load) for path, kind in plans)
        del texts  # Windows cannot remove a mapped file
    return QualityResult(reference=reference, engines=_versions(), bundles=measured, warnings=warnings)


def _other_model(folder: Path, request: QualityRequest) -> str | None:
    """Returns a warning if a bundle's manifest names other weights than the reference; None if both are of the same model.

    A checkpoint is compared only if it is a local folder. Raises RequestError for models of different shapes.
    """
    manifest = open_bundle(folder, check="none").manifest
    source = manifest.sources.get("target")
    if source is None:
        return None
    if request.against is not None:
        other = open_bundle(request.against, check="none").manifest
        if _shape(manifest) != _shape(other):
            raise RequestError(
                f"{folder} holds {_shape(manifest)}, {request.against} {_shape(other)}: these are different models; compare forms of one"
            )
        theirs = other.sources.get("target")
        same = theirs is None or {file.sha256 for file in source.files if _is_weights(file.name)} == {
            file.sha256 for file in theirs.files if _is_weights(file.name)
        }
        name = request.against if theirs is None else f"{request.against} from {theirs.origin}"
    else:
        checkpoint = Path(str(request.checkpoint))
        weights = {file.name: file.bytes for file in source.files if _is_weights(file.name)}
        found = {path.name: path.stat().st_size for path in checkpoint.glob("*.safetensors")} if checkpoint.is_dir() else weights
        same, name = weights == found, str(checkpoint)
    if same:
        return None
    return (
        f"{folder} was made from {source.origin}, with other weights than {name}; unless both are forms of one model, the figures tell"
        " two models apart, and not what quantization costs"
    )


def _shape(manifest: Manifest) -> str:
    facts = manifest.architecture
    return f"{facts.layers} layers of {facts.hidden_size} values for {facts.vocab_size} tokens"


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf"))


def _versions() -> dict[str, str]:
    packages = ["edge-mtp", *(card.package for card in CARDS.values()), "transformers", "torch"]
    return {name: version for name in packages if (version := installed_version(name)) is not None}


def _backends(folder: Path, load: LoadOptions) -> list[BackendKind]:
    return usable_backends(open_bundle(folder, check="none"), load.backend)


def _write_checkpoint(source: str, folder: Path, tokens: int, load: LoadOptions, report: Report) -> str:
    """Runs edge-export in a child process, which writes the checkpoint's logits. Raises RequestError."""
    if find_spec("edge_export") is None:
        raise RequestError(
            f"a checkpoint is read by edge-export, which is not here; {how_to_get('export,verify')}, or compare with a bundle by --against"
        )

    shown = -1

    def show() -> None:
        nonlocal shown
        written = sum((folder / f"{kind}.json").exists() for kind in KINDS)
        if shown < written < len(KINDS):
            shown = written
            report(written / len(KINDS), KINDS[written])

    arguments = (source, str(folder), str(tokens), str(load.threads))
    child = run_child(limited_command(_CHECKPOINT_MODULE, *arguments), environment=import_paths(), each_poll=show, failure=RequestError)
    if child.end:
        raise RequestError(child.reason or f"transformers could not run {source}: the process {child.end}")
    return f"{source} in float32"


def _write_bundle(bundle: Path, folder: Path, tokens: int, load: LoadOptions, report: Report) -> str:
    """Writes the logits of a bundle, computed on the first engine that runs it. Raises EdgeError."""
    backend = _backends(bundle, load)[0]
    with _opened(bundle, backend, tokens, load) as session:
        for done, kind in enumerate(KINDS):
            report(done / len(KINDS), kind)
            ids = _ids(session, kind, tokens)
            write_reference(folder, kind, ids, _rows(session, ids))
        return f"{bundle}, {_quantization(session.bundle, backend)}, {CARDS[backend].title}"


def _compared(bundle: Path, backend: BackendKind, texts: dict[str, ReferenceText], reference: str, load: LoadOptions) -> BundleQuality:
    count = max(len(text.tokens) for text in texts.values())
    with load.waiting(str(bundle)) as report, _opened(bundle, backend, count, load) as session:
        figures = {}
        for done, (kind, text) in enumerate(texts.items()):
            report(done / len(texts), f"{CARDS[backend].title}, {kind}")
            ids, vocabulary = _ids(session, kind, count), session.bundle.manifest.architecture.vocab_size
            if tuple(ids) != text.tokens or vocabulary != text.logits.shape[1]:
                raise BundleError(f"{bundle} and {reference} read the {kind} text as different tokens; compare forms of one model")
            figures[kind] = row_figures(text.logits, _rows(session, ids), ids)
        return BundleQuality(
            bundle=str(bundle),
            backend=backend,
            quantization=_quantization(session.bundle, backend),
            target_bytes=_target_bytes(session.bundle, backend),
            texts=figures,
        )


def _opened(bundle: Path, backend: BackendKind, tokens: int, load: LoadOptions) -> Session:
    return open_session(bundle, replace(load, backend=backend, context=max(tokens, 2 * ROWS_PER_FORWARD)))


def _ids(session: Session, kind: str, count: int) -> list[int]:
    return session.vocabulary.encode(held_out_text(kind), parse_special=True)[:count]


def _rows(session: Session, ids: Sequence[int]) -> Iterator[Logits]:
    return text_rows(session.target, ids, min(ROWS_PER_FORWARD, session.settings.longest_draft + 1))


def _quantization(bundle: Bundle, backend: BackendKind) -> str:
    return bundle.file("target", CARDS[backend].format).quantization or CARDS[backend].format


def _target_bytes(bundle: Bundle, backend: BackendKind) -> int:
    """Returns the size of the target's files for an engine. ONNX graphs have tables of embeddings in npy files."""
    formats = {"gguf": {"gguf"}, "onnx": {"onnx", "onnx_data", "npy"}}[CARDS[backend].format]
    return sum(file.bytes for file in bundle.manifest.files if file.format in formats and file.role.startswith(_TARGET_ROLES))
