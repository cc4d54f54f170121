"""Opens a bundle on a backend: the front door of the runtime's Python interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self, TypedDict, Unpack

from edge_devices.machine.cpu_affinity import processor_groups
from edge_runtime.backends.selection import BackendKind, choose_backend
from edge_runtime.bundle.bundle import Bundle, open_bundle
from edge_runtime.bundle.integrity import CheckMode
from edge_runtime.bundle.kv_types import KvType, check_kv_type
from edge_runtime.calibration.acceptance_cache import AcceptanceCache
from edge_runtime.calibration.first_use import MeasuredPair, PowerSource, measured_costs, measured_threads
from edge_runtime.calibration.thread_probe import ThreadCounts
from edge_runtime.config.schema import SpeculativeConfig
from edge_runtime.config.settings import Settings, load_settings
from edge_runtime.decoding.loop import Round
from edge_runtime.drafting.cost_model import Costs
from edge_runtime.drafting.drafter_kinds import DRAFTER_KINDS, DrafterKind
from edge_runtime.drafting.phase_power import PhasePower
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import Drafter, SequenceBatch, Target
from edge_runtime.planning.memory import MemoryRequest, check_memory, memory_bytes
from edge_runtime.planning.memory_check import available_memory
from edge_runtime.session.batch import BatchDecoder, SingleSequence
from edge_runtime.session.generation import Generation
from edge_runtime.session.monitor import Monitor, MonitorOptions
from edge_runtime.session.session import Session


class OpenOptions(TypedDict, total=False):
    """How to open a bundle; what is left out or None is as the bundle's config.yaml says, or the default.

    `context` is in tokens. `threads` None finds out how many each phase runs fastest on (`thread_probe`). `config` (a file or a `SpeculativeConfig`) goes over the preset, that over the bundle's config.yaml, that over
    the defaults, and what is asked for here over all. Without a `drafter` it is the faster by a short measurement where the bundle has
    both the dense and the split. `notify` gets a sentence now and then, such as about a first probe. `monitoring` says what the
    monitor tells whom; its window is the configured one. `kv_type` is that of the KV cache; `memory_limit`, bytes or a text such as
    "2GB", refuses before it is opened what would take more, and without one the machine is asked (see `check_memory`). `check` says how
    thoroughly the files are compared with the manifest (`integrity`), `public_key` whose signature the bundle must have.
    `power`, watts per phase or who measures them, is what the configuration's objective "energy" needs.

    `backend` None is llama.cpp or onnxruntime, by what the bundle holds and what is installed. The last three are onnxruntime's: where the
    graphs run, whether a single row goes through the kernels of several, and whether packed weights are kept on disk (`OrtOptions`).
    """

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
    power: PhasePower | PowerSource | None
    backend: BackendKind | None
    execution_provider: str | None
    uniform_rows: bool
    keep_packed: bool


class Sessions:
    """Sessions that share one context of one pair: requests on different ones can run at once. Not thread-safe.

    Close this, not the single sessions; or use it as a context manager.
    """

    def __init__(self, sessions: Sequence[Session], together: SequenceBatch) -> None:
        self.sessions = tuple(sessions)
        self.lockstep = BatchDecoder(together)
        self._together = together

    def run(self, generations: Sequence[Generation]) -> Iterator[tuple[Generation, Round]]:
        """Runs requests started on these sessions to their ends, those of different sessions at once; yields their rounds."""
        return self.lockstep.run(generations)

    def close(self) -> None:
        """Frees the models; ends all sessions."""
        for session in self.sessions:
            session.remember()
        self._together.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def default_threads() -> int:
    """Returns how many processors this process may run on."""
    return sum(map(len, processor_groups()))


def open_session(folder: Path | str, **options: Unpack[OpenOptions]) -> Session:
    """Opens a bundle; the options are those of `OpenOptions`.

    The first use of llama.cpp on a machine probes it in a child process, since a build may crash on the processor it runs on.
    Raises BundleError, BackendError, ConfigError, and RequestError for an unknown drafter, backend or provider, or a log that cannot be
    written.
    """
    return open_sessions(folder, 1, **options).sessions[0]


def open_sessions(folder: Path | str, count: int, **options: Unpack[OpenOptions]) -> Sessions:
    """Opens a bundle for `count` requests at once, each with a text of up to `context` tokens. Otherwise as `open_session`.

    More than one at once run on llama.cpp only.
    """
    opening = _prepared(folder, options)
    if choose_backend(opening.bundle, options.get("backend")) == "llama":
        return _open_llama(opening, count, options)
    if count > 1:
        raise RequestError(f"{count} sessions at once run on llama.cpp only; ask for 1, or for the llama backend")
    session = _open_onnx(opening, options)
    return Sessions([session], SingleSequence(session.target, session.drafter))


@dataclass(frozen=True, kw_only=True)
class _Opening:
    """What the options come to."""

    bundle: Bundle
    settings: Settings
    monitor: Monitor
    drafter: DrafterKind | None
    threads: int
    power: PhasePower | PowerSource | None
    notify: Callable[[str], None]


def _prepared(folder: Path | str, options: OpenOptions) -> _Opening:
    drafter, notify = options.get("drafter"), options.get("notify", _silent)
    if drafter is not None and drafter not in DRAFTER_KINDS:
        raise RequestError(f"drafter {drafter!r} is unknown; choose one of {', '.join(DRAFTER_KINDS)}")
    bundle = open_bundle(folder, check=options.get("check", "fast"), public_key=options.get("public_key"))
    settings = load_settings(
        bundle, config=options.get("config"), preset=options.get("preset"), context=options.get("context"), notify=notify
    )
    if settings.objective == "energy":
        _check_energy(settings, options)
    monitor = Monitor(replace(options.get("monitoring") or MonitorOptions(), window=settings.window))
    return _Opening(
        bundle=bundle,
        settings=settings,
        monitor=monitor,
        drafter=drafter or settings.drafter,
        threads=options.get("threads") or default_threads(),
        power=options.get("power"),
        notify=notify,
    )


def _open_onnx(opening: _Opening, options: OpenOptions) -> Session:
    from edge_runtime.backends.onnx.open import OrtOptions, open_onnx

    settings = opening.settings
    _check_onnx(settings, options)
    ort_options = OrtOptions(
        context=settings.context,
        threads=opening.threads,
        provider=options.get("execution_provider"),
        uniform_rows=options.get("uniform_rows", False),
        keep_packed=options.get("keep_packed", False),
    )
    target, drafter, kind = open_onnx(opening.bundle, ort_options, opening.drafter, opening.notify)

    def costs() -> Costs:
        return measured_costs(_pair(opening, target, drafter, target.vocabulary.bos, ort_options, kind), opening.power)

    memory = _memory(opening, "onnx", kind)
    return Session(opening.bundle, target, drafter, target.vocabulary, kind, settings, opening.monitor, costs, memory)


def _open_llama(opening: _Opening, count: int, options: OpenOptions) -> Sessions:
    from edge_runtime.backends.llama.context import LlamaOptions
    from edge_runtime.backends.llama.library import library_version, system_info
    from edge_runtime.backends.llama.open import open_batch
    from edge_runtime.calibration.crash_probe import probe_load_options

    if options.get("execution_provider") is not None or options.get("uniform_rows") or options.get("keep_packed"):
        raise RequestError("execution providers, uniform rows and packed weights are onnxruntime's; ask for them with the onnx backend")
    bundle, settings, drafter = opening.bundle, opening.settings, opening.drafter
    kv_type = check_kv_type(bundle.manifest.cache_layout, options.get("kv_type") or settings.kv_type)
    _check_memory(bundle, settings, options.get("memory_limit"), drafter, kv_type, count, opening.notify)
    has_model = drafter not in ("lookup", "none")
    probed = [bundle.file("target", "gguf"), *([bundle.file("drafter", "gguf")] if has_model else [])]
    paths = [bundle.folder / file.path for file in probed]
    quantizations = [file.quantization or "unknown" for file in probed]
    answer = probe_load_options(paths[0], paths[1] if has_model else None, quantizations, notify=opening.notify)
    together, kind = open_batch(
        bundle,
        LlamaOptions(
            context=settings.context,
            threads=opening.threads,
            use_extra_bufts=answer.use_extra_bufts,
            draft=has_model,
            max_draft_length=settings.longest_draft,
            max_candidates=settings.max_candidates,
            sequences=count,
            kv_type=kv_type,
        ),
        drafter,
    )
    own = zip(together.targets, together.drafters, strict=True)

    facts = (kv_type, kind, answer.use_extra_bufts, library_version(), system_info(), *quantizations)
    pair = _pair(opening, together.targets[0], together.drafters[0], together.vocabulary.bos, *facts)
    threads = ThreadCounts.same(opening.threads)
    if options.get("threads") is None:
        threads = measured_threads(pair, lambda counts: together.set_threads(**counts.to_json()), opening.notify)

    def costs() -> Costs:
        return measured_costs(replace(pair, facts=(*pair.facts, threads)), opening.power)

    curve = cache(costs)
    if count > 1 and settings.policy == "profit":
        curve()  # now, while nobody's text is in the cache
    memory = _memory(opening, "llama", kind)
    sessions = [Session(bundle, target, one, together.vocabulary, kind, settings, opening.monitor, curve, memory) for target, one in own]
    return Sessions(sessions, together)


def _memory(opening: _Opening, backend: str, kind: DrafterKind) -> AcceptanceCache:
    """Drafts of one pair are alike on all machines, but not on both backends, whose weights differ."""
    manifest = opening.bundle.manifest
    measured = (manifest.parity or {}) if backend == "llama" else (manifest.parity or {}).get("onnx")
    drafts = measured.get("drafts") if isinstance(measured, dict) else None
    return AcceptanceCache(
        [backend, kind, *(file.sha256 for file in manifest.files)], exported=drafts.get("confidence") if isinstance(drafts, dict) else None
    )


def _pair(opening: _Opening, target: Target, drafter: Drafter | None, bos: int, *facts: object) -> MeasuredPair:
    hashes = tuple(file.sha256 for file in opening.bundle.manifest.files)
    return MeasuredPair(
        target=target,
        drafter=drafter,
        token=max(bos, 0),
        rows=opening.settings.longest_draft + 1,
        objective=opening.settings.objective,
        facts=(*hashes, opening.threads, *facts),
    )


def _check_energy(settings: Settings, options: OpenOptions) -> None:
    """Raises RequestError where joules cannot be weighed: another policy, or no power of the phases."""
    if settings.policy != "profit":
        raise RequestError(f"the objective energy is for the policy profit, not {settings.policy}; take one or the other back")
    if options.get("power") is None:
        raise RequestError(
            "the objective energy needs the power of each phase, and there is no usable energy meter here (edge-devices meters) and no"
            " file of calibrated watts; give --phase-power FILE, or use the objective time"
        )


def _check_memory(
    bundle: Bundle,
    settings: Settings,
    limit: str | int | None,
    drafter: DrafterKind | None,
    kv_type: KvType,
    count: int,
    notify: Callable[[str], None],
) -> None:
    """Raises RequestError if it would not fit. The probe that says whether weights are copied has still to come; they are counted."""
    from edge_runtime.backends.llama.context import BATCH
    from edge_runtime.backends.llama.open import drafters_opened

    opening = MemoryRequest(
        context=settings.context,
        kv_type=kv_type,
        sequences=count,
        batch=BATCH,
        verify_rows=settings.longest_draft + 1,
        drafters=drafters_opened(bundle, drafter),
        repack=True,
    )
    most = settings.memory_limit if limit is None else memory_bytes(limit)
    check_memory(bundle.manifest, opening, most, available_memory() if most is None else None, notify)


def _check_onnx(settings: Settings, options: OpenOptions) -> None:
    """Raises RequestError for what ONNX graphs do not offer: their rows are fixed, their head looks at a fixed number of tokens."""
    kv_type = options.get("kv_type") or (settings.kv_type if settings.kv_type != "f16" else None)
    if kv_type is not None:
        raise RequestError(f"the K/V rows of ONNX graphs are what --onnx-kv made them at export, not {kv_type}; leave kv_type out")
    refused = {
        "memory_limit": options.get("memory_limit") or settings.memory_limit,
        "max_candidates": settings.max_candidates,
    }
    for name, value in refused.items():
        if value is not None:
            raise RequestError(f"{name} {value} is not for ONNX graphs; leave it out, or take the llama backend")


def _silent(_: str) -> None:
    """Nobody wants to hear."""
