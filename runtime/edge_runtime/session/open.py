"""Opens a bundle on a backend: `open_session` and `open_sessions`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_devices.files.user_cache import entry_key
from edge_devices.machine.cpu_affinity import keep_to_fastest, processor_groups
from edge_devices.machine.facts import cpu_identity, installed_version
from edge_devices.machine.memory import available_memory_bytes
from edge_runtime.backends.kernels.loader import variant as row_kernels
from edge_runtime.backends.selection import BackendKind, usable_backends
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.kv_types import KvType, check_kv_type
from edge_runtime.bundle.manifest import AUDIO_ENCODER, MEDIA_ENCODER, VISION_ENCODER
from edge_runtime.calibration.acceptance_cache import AcceptanceCache
from edge_runtime.calibration.backend_choice import measured_rates
from edge_runtime.calibration.first_use import MeasuredPair, measured_costs, measured_placement, measured_threads
from edge_runtime.calibration.measured import without_repeats
from edge_runtime.calibration.thread_probe import ThreadCounts
from edge_runtime.config.settings import load_settings
from edge_runtime.drafting.cost_model import Costs
from edge_runtime.drafting.drafter_kinds import DRAFTER_KINDS, DrafterKind
from edge_runtime.drafting.phase_power import PhasePower
from edge_runtime.drafting.stored_memory import StoredMemory
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import Drafter, Target, Vocabulary
from edge_runtime.media.image import check_budget
from edge_runtime.media.soft_rows import Encoder, LazyEncoder
from edge_runtime.planning.encoder_memory import EncoderMemory
from edge_runtime.planning.memory import MemoryRequest, check_memory_without_copies, memory_bytes, memory_plan
from edge_runtime.session.batch import Sessions, SingleSequence
from edge_runtime.session.load_options import LoadOptions, with_keywords
from edge_runtime.session.monitoring.monitor import Monitor, MonitorOptions
from edge_runtime.session.session import Session, SessionParts

DISTRIBUTION = "edge-mtp"

if TYPE_CHECKING:
    from edge_runtime.backends.llama.open import LlamaSequenceBatch


def default_threads() -> int:
    """Returns how many processors this process may run on."""
    return sum(map(len, processor_groups()))


@with_keywords(LoadOptions, LoadOptions)
def open_session(folder: Path | str, options: LoadOptions | None = None, **keywords: Any) -> Session:
    """Opens a bundle. Options are given as keywords (`open_session("bundle", context=2048)`), as `LoadOptions`, or both; keywords win.

    On first use, llama.cpp is probed in a child process, since a build may crash on the processor it runs on.
    Raises BundleError, BackendError, ConfigError, and RequestError for an unknown drafter, backend or provider, a bundle that does not
    fit into memory, or a log that cannot be written.
    """
    return open_sessions(folder, 1, options, **keywords).sessions[0]


@with_keywords(LoadOptions, LoadOptions)
def open_sessions(folder: Path | str, count: int, options: LoadOptions | None = None, **keywords: Any) -> Sessions:
    """Opens a bundle for `count` requests at once, each with `context` tokens of its own. Otherwise as `open_session`.

    More than one at once run on llama.cpp only. Where both backends can run a bundle, the first use measures which is faster.
    """
    loader = _PairLoader(folder, replace(options or LoadOptions(), **keywords))
    return loader.load(loader.choose_backend(count), count)


@with_keywords(LoadOptions, LoadOptions)
def faster_backend(folder: Path | str, options: LoadOptions | None = None, **keywords: Any) -> BackendKind:
    """Returns the backend that `open_session` would take with these options; measures as it does, and raises as it does."""
    return _PairLoader(folder, replace(options or LoadOptions(), **keywords)).choose_backend(1)


class _PairLoader:
    """One bundle with its resolved settings, to be loaded on a backend."""

    def __init__(self, folder: Path | str, options: LoadOptions) -> None:
        if options.remember and options.draft_store is None:
            raise RequestError("remember adds files to a draft store; name its file as draft_store too")
        if options.drafter is not None and options.drafter not in DRAFTER_KINDS:
            raise RequestError(f"drafter {options.drafter!r} is unknown; choose one of {', '.join(DRAFTER_KINDS)}")
        # Probes of several backends say the same of a busy machine.
        self.options = options = replace(options, notify=without_repeats(options.notify))
        self.bundle = open_bundle(folder, check=options.check, public_key=options.public_key)
        self.hashes = [file.sha256 for file in self.bundle.manifest.files]
        self.settings = load_settings(
            self.bundle, config=options.config, preset=options.preset, context=options.context, notify=options.notify
        )
        if self.settings.objective == "energy":
            self._check_energy()
        self.monitor = Monitor(replace(options.monitoring or MonitorOptions(), window=self.settings.window))
        self.drafter = options.drafter or self.settings.drafter
        self.threads = options.threads or default_threads()
        self._memory: StoredMemory | None = None

    def choose_backend(self, count: int) -> BackendKind:
        """Returns the backend that the options need, or else the faster one on this machine, which the first use measures."""
        options, settings = self.options, self.settings
        usable = usable_backends(self.bundle, options.backend)
        of_llama: list[object] = [count > 1, options.kv_type, settings.kv_type != "f16", options.memory_limit, settings.memory_limit]
        of_llama += [settings.max_candidates, self.bundle.manifest.media, self.drafter not in (None, "none", "lookup")]
        needed = [kind for kind, wants in (("llama", of_llama), ("onnx", [options.execution_provider, options.keep_packed])) if any(wants)]
        if len(usable) == 1 or len(needed) == 2:
            return usable[0]
        if needed:
            return next(kind for kind in usable if kind in needed)
        policy = [settings.context, settings.policy, settings.start, settings.longest, settings.longest_draft, settings.objective]

        def rate_of(kind: BackendKind) -> float:
            with self.load(kind, 1) as sessions:
                return sessions.sessions[0].expected_rate()

        facts = [*self.hashes, self.threads, options.threads is None, self.drafter, *policy]
        return measured_rates(self.bundle.folder.name, facts, usable, rate_of, options.notify).fastest

    def load(self, kind: BackendKind, count: int) -> Sessions:
        """Loads the bundle for `count` requests at once. Raises RequestError if the backend runs fewer."""
        if kind == "llama":
            return self.load_llama(count)
        if count > 1:
            raise RequestError(f"{count} sessions at once run on llama.cpp only; ask for 1, or for the llama backend")
        return self.load_onnx()

    def load_onnx(self) -> Sessions:
        """Loads the bundle's graphs for one request at a time."""
        from edge_runtime.backends.onnx.loader import library_version
        from edge_runtime.backends.onnx.open import OrtOptions, media_encoder, open_onnx

        self._check_onnx()
        keep_to_fastest(default_threads(), processor_groups())  # on all: a session on llama.cpp may have left this process on some
        options = self.options
        ort_options = OrtOptions(
            context=self.settings.context,
            threads=self.threads,
            provider=options.execution_provider,
            keep_packed=options.keep_packed,
            check=options.check,
        )
        target, drafter, kind = open_onnx(self.bundle, ort_options, self.drafter, options.notify)
        facts = (ort_options, kind, row_kernels())
        pair = self._measured_pair(target, drafter, target.vocabulary.bos, *facts)
        exported = (self.bundle.manifest.parity or {}).get("onnx")
        parts = self._parts(
            target,
            drafter,
            target.vocabulary,
            kind=kind,
            backend="onnx",
            kernels=row_kernels() if target.row_kernels else None,
            costs=lambda: measured_costs(pair, options.power, options.notify, waiting=options.waiting),
            acceptance_cache=self._acceptance_cache("onnx", kind, exported),
            encoder=self._encoder(
                "onnx", lambda: media_encoder(self.bundle, ort_options), EncoderMemory(self.bundle.manifest, "onnx", available_memory_bytes)
            ),
            fingerprint=self._fingerprint(library_version(), *facts),
        )
        return Sessions([Session(parts)], SingleSequence(target, drafter))

    def load_llama(self, count: int) -> Sessions:
        """Loads the bundle's GGUF files in one context with `count` sequences."""
        from edge_runtime.backends.llama.loader import library_version, llama_library, system_info

        options = self.options
        if options.execution_provider is not None or options.keep_packed:
            raise RequestError("execution providers and packed weights are onnxruntime's; ask for them with the onnx backend")
        kv_type = check_kv_type(self.bundle.manifest.cache_layout, options.kv_type or self.settings.kv_type)
        repack, planned = self._check_memory(kv_type, count)
        batch, kind, use_extra_bufts, quantizations = self._open_llama(kv_type, count, repack=repack)
        facts = (kv_type, kind, use_extra_bufts, llama_library().row_kernels, library_version(), system_info(), *quantizations)
        pair = self._measured_pair(batch.targets[0], batch.drafters[0], batch.vocabulary.bos, *facts)
        if options.threads is None:
            pair = self._with_best_threads(pair, batch)
        else:
            pair = replace(pair, facts=(*pair.facts, ThreadCounts.same(self.threads)))
        costs = cache(lambda: measured_costs(pair, options.power, options.notify, waiting=options.waiting))
        if count > 1 and self.settings.policy == "profit":
            costs()  # measuring empties the cache, so it is done before any request runs
        acceptance_cache = self._acceptance_cache("llama", kind, self.bundle.manifest.parity)
        fingerprint = self._fingerprint(count, *facts)
        room = EncoderMemory(self.bundle.manifest, "llama", available_memory_bytes, self._memory_limit, planned)
        encoder = self._encoder("gguf", lambda: batch.open_encoder(self.bundle.path(MEDIA_ENCODER, "gguf")), room)
        sessions = [
            Session(
                self._parts(
                    target,
                    drafter,
                    batch.vocabulary,
                    kind=kind,
                    backend="llama",
                    kernels=llama_library().row_kernels if use_extra_bufts else None,
                    costs=costs,
                    acceptance_cache=acceptance_cache,
                    fingerprint=fingerprint,
                    encoder=encoder,
                )
            )
            for target, drafter in zip(batch.targets, batch.drafters, strict=True)
        ]
        return Sessions(sessions, batch)

    def _with_best_threads(self, pair: MeasuredPair, batch: LlamaSequenceBatch) -> MeasuredPair:
        """Sets the best threads; returns the pair with them among its facts, and with the slowdown that they leave of what is allowed."""
        power, notify, waiting = self.options.power, self.options.notify, self.options.waiting

        def set_threads(counts: ThreadCounts) -> None:
            batch.set_threads(**counts.to_json())

        if pair.objective != "energy" or power is None or isinstance(power, PhasePower):
            return replace(pair, facts=(*pair.facts, measured_threads(pair, set_threads, notify, waiting=waiting)))
        placement, slower = measured_placement(pair, set_threads, power, notify, waiting=waiting)
        left = None if pair.slowdown is None else max(0.0, (1 + pair.slowdown) / slower - 1)
        return replace(pair, facts=(*pair.facts, placement), slowdown=left)

    def _open_llama(self, kv_type: KvType, count: int, *, repack: bool) -> tuple[LlamaSequenceBatch, DrafterKind, bool, list[str]]:
        """Returns the loaded sequences, the kind of drafter, whether weights are repacked, and the files' quantizations."""
        from edge_runtime.backends.llama.context import LlamaOptions
        from edge_runtime.backends.llama.open import open_batch
        from edge_runtime.calibration.crash_probe import probe_load_options

        bundle, settings = self.bundle, self.settings
        has_model = self.drafter not in ("lookup", "none")
        probed = [bundle.file("target", "gguf"), *([bundle.file("drafter", "gguf")] if has_model else [])]
        paths = [bundle.folder / file.path for file in probed]
        quantizations = [file.quantization or "unknown" for file in probed]
        answer = probe_load_options(
            paths[0], paths[1] if has_model else None, quantizations, notify=self.options.notify, waiting=self.options.waiting
        )
        use_extra_bufts = answer.use_extra_bufts and repack
        llama_options = LlamaOptions(
            context=settings.context,
            threads=self.threads,
            use_extra_bufts=use_extra_bufts,
            draft=has_model,
            max_draft_length=settings.longest_draft,
            max_candidates=settings.max_candidates,
            sequences=count,
            kv_type=kv_type,
            batch=self._batch_rows(),
            bidirectional=self._bidirectional,
        )
        batch, kind = open_batch(bundle, llama_options, self.drafter)
        return batch, kind, use_extra_bufts, quantizations

    @property
    def _bidirectional(self) -> bool:
        media = self.bundle.manifest.media
        return media is not None and media.bidirectional

    def _batch_rows(self) -> int:
        """Rows of llama.cpp's largest forward."""
        from edge_runtime.backends.llama.context import BATCH

        check_budget(self.options.image_rows)
        return max(BATCH, self.options.image_rows) if self._bidirectional else BATCH

    def _parts(
        self,
        target: Target,
        drafter: Drafter | None,
        vocabulary: Vocabulary,
        *,
        kind: DrafterKind,
        backend: BackendKind,
        kernels: str | None,
        costs: Callable[[], Costs],
        acceptance_cache: AcceptanceCache,
        fingerprint: str,
        encoder: LazyEncoder | None = None,
    ) -> SessionParts:
        return SessionParts(
            bundle=self.bundle,
            generation=self.bundle.manifest.generation,
            target=target,
            drafter=drafter,
            vocabulary=vocabulary,
            drafter_kind=kind,
            backend=backend,
            row_kernels=kernels,
            settings=self.settings,
            monitor=self.monitor,
            costs=costs,
            acceptance_cache=acceptance_cache,
            encoder=encoder,
            memory=self._stored_memory(vocabulary),
            fingerprint=fingerprint,
        )

    def _fingerprint(self, *facts: object) -> str:
        """Returns a hash of all that an answer depends on beside its request: files, context, code, processor."""
        return entry_key([project_version(), cpu_identity(), str(self.settings.context), self.hashes, [*map(str, facts)]])

    def _stored_memory(self, vocabulary: Vocabulary) -> StoredMemory | None:
        """The memory on the disk, which all sessions share."""
        options = self.options
        if self._memory is None and options.draft_store is not None:
            limit = memory_bytes(options.draft_store_size)
            self._memory = StoredMemory(Path(options.draft_store), vocabulary, limit=limit, notify=options.notify)
            for path in options.remember:
                self._memory.remember_file(Path(path))
        return self._memory

    def _encoder(self, format: str, load: Callable[[], Encoder], room: EncoderMemory) -> LazyEncoder | None:
        roles = (MEDIA_ENCODER, VISION_ENCODER, AUDIO_ENCODER)
        files = [file for file in self.bundle.manifest.files if file.format.startswith(format) and file.role.removesuffix("_data") in roles]
        if self.bundle.manifest.media is None or not files or (self._bidirectional and format == "onnx"):
            return None
        return LazyEncoder(load, " ".join(file.sha256 for file in files), room)

    def _measured_pair(self, target: Target, drafter: Drafter | None, bos: int, *facts: object) -> MeasuredPair:
        return MeasuredPair(
            target=target,
            drafter=drafter,
            token=max(bos, 0),
            rows=self.settings.longest_draft + 1,
            objective=self.settings.objective,
            slowdown=self.settings.slowdown,
            facts=(*self.hashes, self.threads, *facts),
        )

    def _acceptance_cache(self, backend: str, kind: DrafterKind, parity: object) -> AcceptanceCache:
        """Drafts of a pair are the same on all machines, but not on both backends, whose weights differ."""
        drafts = parity.get("drafts") if isinstance(parity, dict) else None
        exported = drafts.get("confidence") if isinstance(drafts, dict) else None
        return AcceptanceCache([backend, kind, *self.hashes], exported=exported)

    def _check_energy(self) -> None:
        """Raises RequestError where joules cannot be minimized: another policy, or the power of the phases is not known."""
        if self.settings.policy != "profit":
            raise RequestError(f"the objective energy needs the policy profit, not {self.settings.policy}; change one of them")
        if self.options.power is None:
            raise RequestError(
                "the objective energy needs the power of each phase, and there is no usable energy meter here (edge-devices meters) and no"
                " file of calibrated watts; give --phase-power FILE, or use the objective time"
            )

    @property
    def _memory_limit(self) -> int | None:
        limit = self.options.memory_limit
        return self.settings.memory_limit if limit is None else memory_bytes(limit)

    def _check_memory(self, kv_type: KvType, count: int) -> tuple[bool, int]:
        """Returns whether there is room for repacked copies of weights, and the bytes of the plan.

        Raises RequestError if the bundle would not fit without copies either.

        Repacked weights are counted, because the probe that decides on repacking runs later.
        """
        from edge_runtime.backends.llama.open import drafters_opened

        settings, most = self.settings, self._memory_limit
        request = MemoryRequest(
            context=settings.context,
            kv_type=kv_type,
            sequences=count,
            batch=self._batch_rows(),
            verify_rows=settings.longest_draft + 1,
            drafters=drafters_opened(self.bundle, self.drafter),
            repack=True,
        )
        repack = check_memory_without_copies(
            self.bundle.manifest, request, most, available_memory_bytes() if most is None else None, self.options.notify
        )
        return repack, memory_plan(self.bundle.manifest, replace(request, repack=repack)).total

    def _check_onnx(self) -> None:
        """Raises RequestError for options that ONNX graphs do not have: their K/V type and their head's candidates are fixed at export."""
        options, settings = self.options, self.settings
        kv_type = options.kv_type or (settings.kv_type if settings.kv_type != "f16" else None)
        if kv_type is not None:
            raise RequestError(f"the K/V type of ONNX graphs is fixed at export (--onnx-kv) and cannot be {kv_type}; leave kv_type out")
        refused = {"memory_limit": options.memory_limit or settings.memory_limit, "max_candidates": settings.max_candidates}
        for name, value in refused.items():
            if value is not None:
                raise RequestError(f"{name} {value} is not for ONNX graphs; leave it out, or use the llama backend")


def project_version() -> str:
    """Returns the installed version of this project, or an empty text in packages for devices."""
    return installed_version(DISTRIBUTION) or ""
