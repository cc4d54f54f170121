"""How a bundle is loaded: the options of `open_session` and `open_sessions`."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from edge_devices.machine.processors import MAX_THREADS
from edge_devices.option_fields import option
from edge_devices.waiting import Waiting, silent_wait
from edge_runtime.backends.selection import BACKENDS, BackendKind
from edge_runtime.bundle.bundle import CheckMode
from edge_runtime.bundle.gguf_header import KvType
from edge_runtime.config.schema import MAX_CONTEXT, PRESET_NAMES, SpeculativeConfig
from edge_runtime.drafting.energy_objective import PhasePower, PowerSource
from edge_runtime.drafting.policies import DrafterKind
from edge_runtime.errors import RequestError
from edge_runtime.media.encoder_inputs import BUDGETS, DEFAULT_BUDGET
from edge_runtime.session.monitor import MonitorOptions
from edge_runtime.session.prompt_cache import LIMIT

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How to load a bundle. None means the configured value, or else the default.

    The configuration has layers: `config` overrides `preset`, which overrides the bundle's config.yaml, which overrides the defaults.
    `context`, `drafter`, `kv_type` and `memory_limit` override all of them.

    Attributes:
        threads: Threads of every phase. None takes the fastest numbers that were measured, or else the usual ones for the processor.
        context: Size of the KV cache in tokens, prompt and answer together.
        drafter: Kind of drafter. None takes split if the bundle has it and the row kernels run, else dense.
        config: A configuration file, or a `SpeculativeConfig`.
        preset: Name of a preset: code, chat, edge or batch.
        monitoring: Thresholds, log file and callback of the session's monitor; its window is the configured one.
        kv_type: Type of the K/V rows: f16, q8_0 or q4_0 (llama.cpp).
        memory_limit: Bytes, or a text such as "2GB". A bundle that needs more is refused before it is loaded. None takes the memory that is
            available on the machine (llama.cpp).
        check: How thoroughly files are compared with the manifest: fast, full or none (`bundle.CheckMode`).
        public_key: PEM file of the Ed25519 key that must have signed the bundle.
        notify: Called with a sentence about slow steps, such as a measurement.
        waiting: Shows progress during waits of seconds. It is called with what is done, and returns a context manager; the value of that is
            called with the share that is done. `edge_devices.waiting.terminal_wait` shows a bar in a terminal.
        power: Watts per phase, or a function that measures them; needed for the objective "energy".
        measure: Whether to spend some seconds before the first request on measuring threads, costs of drafts and the faster backend, unless
            earlier measurements are stored. Otherwise costs are computed from file sizes, and the rounds of requests then replace them.
        backend: llama or onnx. None takes the one that was measured to be faster on this machine, or else is estimated from file sizes.
        device: Where the model runs: "cpu", "gpu", "npu", the name of an execution provider of ONNX Runtime, or a device's own name such as
            "vulkan0" or "openvino:NPU", which `edge-run doctor` lists. "auto" takes the fastest one, measured on first use.
        prompt_cache: Folder for the K/V rows of prompts, readable by you alone; created if it is missing. None caches no prompts.
        prompt_cache_limit: The most bytes of that folder, or a text such as "500MB". The least recently used files are removed.
        packed_cache: Stores weights in the order of the row kernels in the user's cache. Later starts map these files, so they are
            faster and take less memory. The files take at most 8 GB, and at most half of the free disk space; the least recently used ones
            are removed.
        image_rows: The largest budget of an image, in soft rows, for models whose images must fit one batch: 12B and larger. A budget above
            512 takes more memory (llama.cpp).
    """

    threads: int | None = option(
        "-t",
        low=1,
        high=MAX_THREADS,
        panel="Backend",
        help="CPU threads, at most one per processor.  [default: the fastest number per phase, if edge-run tune measured it]",
    )
    context: int | None = option(
        "-c", low=16, high=MAX_CONTEXT, panel="Memory", help="Size of the KV cache in tokens.  [default: from the configuration]"
    )
    drafter: DrafterKind | None = option(
        panel="Drafting",
        help="dense: MTP drafter; split: MTP drafter with a sparse head; lookup: copies from the text; none: no drafts."
        "  [default: from the configuration, else split if the bundle has it and it runs here, else dense]",
    )
    config: SpeculativeConfig | Path | str | None = option(
        type=Path, metavar="FILE", panel="Bundle", help="YAML file whose settings override those of the bundle's config.yaml."
    )
    preset: str | None = option(
        choices=PRESET_NAMES, panel="Bundle", help="Draft lengths for a kind of work; overrides the bundle's config.yaml."
    )
    monitoring: MonitorOptions | None = None
    kv_type: KvType | None = option(
        panel="Memory", help="Data type of the KV cache; smaller types are less exact.  [default: from the configuration]"
    )
    memory_limit: str | int | None = option(
        panel="Memory",
        help="Refuse to open a bundle that needs more memory, such as 2GB.  [default: from the configuration, else the available memory]",
    )
    check: CheckMode = option(
        default="fast",
        panel="Bundle",
        help="full: SHA-256 of all files; fast: SHA-256 on first use, then sizes, times and samples; none: sizes only.",
    )
    public_key: Path | None = option(
        "--verify-key",
        metavar="PUBKEY",
        panel="Bundle",
        help="Refuse the bundle unless it is signed with this Ed25519 key (PEM). Needs edge-mtp[sign].",
    )
    notify: Callable[[str], None] = lambda _: None
    waiting: Waiting = silent_wait
    power: PhasePower | PowerSource | None = None
    backend: BackendKind | None = option(
        "-b",
        choices=BACKENDS,
        panel="Backend",
        help="llama.cpp or ONNX Runtime.  [default: the faster one if edge-run tune measured both, else estimated from file sizes]",
    )
    measure: bool = False
    device: str | None = option(
        metavar="NAME",
        panel="Backend",
        help="Where a model runs: cpu, gpu, npu, a name that edge-run doctor lists, or auto: the fastest, measured once.  [default: cpu]",
    )
    prompt_cache: Path | None = None
    prompt_cache_limit: str | int = LIMIT
    packed_cache: bool = option(
        "--no-packed-cache",
        default=True,
        flag_value=False,
        show_default=False,
        panel="Memory",
        help="Pack weights into memory at each start, and keep no packed copy of them in ~/.cache/edge-mtp for later starts.",
    )
    image_rows: int = option(
        default=DEFAULT_BUDGET,
        choices=BUDGETS,
        panel="Images and sound",
        help="The most tokens of the context that an image may take: more tokens show finer detail and take longer."
        " A server's requests choose their own;"
        " for 12B and larger it is the most that they may choose.",
    )

    def __post_init__(self) -> None:
        """Raises RequestError for a `public_key` with the check "none"."""
        if self.public_key is not None and self.check == "none":
            raise RequestError("--verify-key is of no use with --check none, which does not compare the files; leave one of them out")


def with_keywords(keywords: type, defaults: object, *, elsewhere: Mapping[str, Collection[str]]) -> Callable[[F], F]:
    """A decorator that makes help() and editors show the fields of a dataclass, or the keys of a TypedDict, in place of **keywords.

    The function then raises RequestError for any other keyword. The error names the call that takes this keyword, the most similar
    keyword, or all of them. `defaults` has an attribute for each keyword with a default value; the others are shown as "...". `elsewhere`
    has the keywords of related calls, by how these are written ("generate({}=...)").
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        named = [parameter for parameter in signature.parameters.values() if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
        added = [
            # A TypedDict wraps the text of an annotation in a ForwardRef.
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(defaults, name, ...),
                annotation=getattr(annotation, "__forward_arg__", annotation),
            )
            for name, annotation in inspect.get_annotations(keywords).items()
        ]
        known = [parameter.name for parameter in (*named, *added) if parameter.name != "self"]
        title = function.__qualname__.removesuffix(".__init__")

        def advice(name: str) -> str:
            for call, names in elsewhere.items():
                if name in names:
                    return f"it belongs to {call.format(name)}"
            near = difflib.get_close_matches(name[:64], known, n=1)
            return f"the nearest one is {near[0]!r}" if near else f"it has {', '.join(known)}"

        @functools.wraps(function)
        def checked(*arguments: Any, **options: Any) -> Any:
            for name in options:
                if name not in known:
                    raise RequestError(f"{title} has no option {name[:64]!r}; {advice(name)}")
            return function(*arguments, **options)

        checked.__signature__ = signature.replace(parameters=[*named, *added])  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorate


# The keywords of `LoadOptions`, for error messages of calls that do not open a bundle.
OPENING = {"open_session({}=...)": tuple(LoadOptions.__dataclass_fields__)}
