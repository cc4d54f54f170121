"""How a bundle is loaded: the options of `open_session` and `open_sessions`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from edge_devices.waiting import Waiting, silent_wait
from edge_runtime.backends.selection import BackendKind
from edge_runtime.bundle.integrity import CheckMode
from edge_runtime.bundle.kv_types import KvType
from edge_runtime.calibration.placement import PowerSource
from edge_runtime.config.schema import SpeculativeConfig
from edge_runtime.drafting.drafter_kinds import DrafterKind
from edge_runtime.drafting.phase_power import PhasePower
from edge_runtime.drafting.stored_memory import MEMORY_SIZE
from edge_runtime.media.image import DEFAULT_BUDGET
from edge_runtime.session.monitoring.monitor import MonitorOptions

F = TypeVar("F", bound=Callable[..., Any])


def _ignore(_: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How to load a bundle. None means: as configured, otherwise the default.

    The configuration has layers: `config` overrides `preset`, that overrides the bundle's config.yaml, and that overrides the defaults.
    `context`, `drafter`, `kv_type` and `memory_limit` override all of them.

    Attributes:
        threads: Threads of every phase; None measures on first use how many each phase runs fastest on.
        context: Size of the KV cache in tokens, prompt and answer together.
        drafter: Kind of drafter; None takes the faster of dense and split, by a short measurement, where the bundle has both.
        config: A configuration file, or a `SpeculativeConfig`.
        preset: Name of a preset: code, chat, edge or batch.
        monitoring: Thresholds, log file and callback of the session's monitor; its window is the configured one.
        kv_type: Type of the K/V rows: f16, q8_0 or q4_0 (llama.cpp).
        memory_limit: Bytes, or a text such as "2GB": what would take more is refused before it is loaded. None compares with the memory
            that is available on the machine (llama.cpp).
        check: How thoroughly files are compared with the manifest: fast, full or none (`integrity`).
        public_key: PEM file of the Ed25519 key that must have signed the bundle.
        notify: Called with a sentence about slow steps, such as a measurement on first use.
        waiting: Shows waits of seconds: called with what is done, returns a context manager whose value is called with the share that is
            done. `edge_devices.waiting.terminal_wait` shows a bar in a terminal.
        power: Watts per phase, or a function that measures them; needed for the objective "energy".
        backend: llama or onnx; None takes the faster one on this machine of those that are installed, by a measurement on first use.
        execution_provider: ONNX Runtime's execution provider, such as "xnnpack" (onnx).
        keep_packed: Whether packed weights are kept on disk for the next start (onnx).
        memory: File of earlier answers and remembered files, from which drafts are copied; made if it is missing. None keeps nothing.
        memory_size: The most bytes of that file, or a text such as "2MB"; the oldest texts make room.
        remember: Text files to add to it.
        image_rows: The largest budget of an image, in soft rows, where an image must fit one batch: 12B and larger. Above 512 it takes more
            memory (llama.cpp).
    """

    threads: int | None = None
    context: int | None = None
    drafter: DrafterKind | None = None
    config: SpeculativeConfig | Path | str | None = None
    preset: str | None = None
    monitoring: MonitorOptions | None = None
    kv_type: KvType | None = None
    memory_limit: str | int | None = None
    check: CheckMode = "fast"
    public_key: Path | None = None
    notify: Callable[[str], None] = _ignore
    waiting: Waiting = silent_wait
    power: PhasePower | PowerSource | None = None
    backend: BackendKind | None = None
    execution_provider: str | None = None
    keep_packed: bool = False
    memory: Path | None = None
    memory_size: str | int = MEMORY_SIZE
    remember: Sequence[Path] = ()
    image_rows: int = DEFAULT_BUDGET


class LoadKeywords(TypedDict, total=False):
    """The fields of `LoadOptions` as keyword arguments; a test keeps the two equal."""

    threads: int | None
    context: int | None
    drafter: DrafterKind | None
    config: SpeculativeConfig | Path | str | None
    preset: str | None
    monitoring: MonitorOptions | None
    kv_type: KvType | None
    memory_limit: str | int | None
    check: CheckMode
    public_key: Path | None
    notify: Callable[[str], None]
    waiting: Waiting
    power: PhasePower | PowerSource | None
    backend: BackendKind | None
    execution_provider: str | None
    keep_packed: bool
    memory: Path | None
    memory_size: str | int
    remember: Sequence[Path]
    image_rows: int


def with_keywords(keywords: type, defaults: object = None) -> Callable[[F], F]:
    """A decorator that lets help() and editors show the keys of a TypedDict in place of **keywords.

    `defaults` has an attribute for each key with a default; others are shown without a value of their own ("...").
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        named = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(defaults, name, ...), annotation=annotation)
            for name, annotation in inspect.get_annotations(keywords).items()
        ]
        function.__signature__ = signature.replace(parameters=[*named, *added])  # type: ignore[attr-defined]
        return function

    return decorate
