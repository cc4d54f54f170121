"""Opens a bundle on a backend: `open_session` and `open_sessions`."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_devices.files.user_cache import entry_key
from edge_devices.machine.device_package import installed_version
from edge_devices.machine.processors import cpu_identity, processor_groups
from edge_runtime.backends.interface import CPU, OpenedPair, OpenRequest
from edge_runtime.backends.kernels.loader import variant
from edge_runtime.backends.kernels.packed_cache import user_cache
from edge_runtime.backends.selection import (
    AUTO,
    CARDS,
    KINDS,
    BackendChoice,
    BackendKind,
    backend_of,
    check_options,
    device_of,
    fitting_backends,
    kept_rates,
    load_backend,
    measured_rates,
)
from edge_runtime.bundle.bundle import degradation, first_time, open_bundle
from edge_runtime.bundle.gguf_header import DEFAULT_KV_TYPE
from edge_runtime.calibration.first_use import MeasuredPair, PairCosts, ThreadCounts, on_best_threads
from edge_runtime.calibration.measured import AcceptanceCache, exported_counts, without_repeats
from edge_runtime.config.settings import load_settings
from edge_runtime.drafting.cost_model import CostCurve
from edge_runtime.drafting.policies import DEFAULT_POLICY, DRAFTER_KINDS, is_model
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.interfaces import SavableTarget
from edge_runtime.planning.memory import memory_bytes
from edge_runtime.planning.speed import computed_costs
from edge_runtime.session.batch import Sessions
from edge_runtime.session.cache_claim import CacheClaim
from edge_runtime.session.load_options import LoadOptions, with_keywords
from edge_runtime.session.monitor import Monitor, MonitorOptions
from edge_runtime.session.prompt_cache import PromptCache, row_facts
from edge_runtime.session.self_checks import CHECKS, DeviceCheck, answers, compared, is_rounded
from edge_runtime.session.session import Session, SessionParts, rate_with

# The options of a request, for errors about options that do not belong to opening.
_OF_REQUESTS = {"generate({}=...)": [name for name in inspect.signature(Session.generate).parameters if name != "self"]}


def default_threads() -> int:
    """Returns how many processors this process may run on."""
    return sum(map(len, processor_groups()))


@with_keywords(LoadOptions, LoadOptions, elsewhere=_OF_REQUESTS)
def open_session(folder: Path | str, options: LoadOptions | None = None, **keywords: Any) -> Session:
    """Opens a bundle. Options are given as keywords (`open_session("bundle", context=2048)`), as `LoadOptions`, or both; keywords win.

    On first use, llama.cpp is tried in a child process, because a build may crash on a processor that it was not compiled for.
    Raises BundleError, BackendError, ConfigError, and RequestError for an unknown drafter, backend or provider, a bundle that does not
    fit into memory, or a log that cannot be written.
    """
    return open_sessions(folder, 1, options, **keywords).sessions[0]


@with_keywords(LoadOptions, LoadOptions, elsewhere=_OF_REQUESTS)
def open_sessions(folder: Path | str, count: int, options: LoadOptions | None = None, **keywords: Any) -> Sessions:
    """Opens a bundle for `count` concurrent requests, each with its own `context` tokens. Otherwise as `open_session`.

    Only llama.cpp runs more than one request at once. If several backends can run a bundle, the one that was measured or computed to be
    the fastest is used.
    """
    loader = _PairLoader(folder, replace(options or LoadOptions(), **keywords))
    return loader.load(loader.choose_backend(count), count)


@with_keywords(LoadOptions, LoadOptions, elsewhere=_OF_REQUESTS)
def faster_backend(folder: Path | str, options: LoadOptions | None = None, **keywords: Any) -> BackendKind:
    """Returns the backend that `open_session` would choose with these options. Measures and raises as it does."""
    return backend_of(_PairLoader(folder, replace(options or LoadOptions(), **keywords)).choose_backend(1))


class _PairLoader:
    """One bundle with its resolved settings, to be loaded on a backend."""

    def __init__(self, folder: Path | str, options: LoadOptions) -> None:
        if options.drafter is not None and options.drafter not in DRAFTER_KINDS:
            raise RequestError(f"drafter {options.drafter!r} is unknown; choose one of {', '.join(DRAFTER_KINDS)}")
        # Measurements of several backends would print the same sentence about a busy machine.
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
        self.auto = options.device == AUTO

    def choose_backend(self, count: int) -> BackendChoice:
        """Returns the backend that the options require; if several fit, the faster one by measurements, or else by computed costs.

        With the device "auto", accelerators are compared too, and only those that compute what the CPU does can be chosen. On a machine
        without accelerators, a bundle with media, or a drafter model that the options or settings name, takes the first fitting backend
        without comparing speeds.
        """
        options, settings = self.options, self.settings
        fitting = fitting_backends(self._request(count), options.backend)
        accelerators = {kind: load_backend(kind).accelerators() for kind in fitting} if self.auto else {}
        if any(accelerators.values()):
            fitting = [*fitting, *(f"{kind} {name}" for kind, names in accelerators.items() for name in names)]
        elif len(fitting) == 1 or self.bundle.manifest.media is not None or (self.drafter is not None and is_model(self.drafter)):
            return fitting[0]
        policy = [settings.context, settings.policy, settings.draft_length, settings.longest, settings.longest_draft, settings.objective]

        def rate_of(choice: BackendChoice) -> float:
            with self.load(choice, 1) as sessions:
                return sessions.sessions[0].expected_rate()

        named = None if self.auto else options.device
        where = [accelerators] if any(accelerators.values()) else [named] if named not in (None, CPU) else []
        facts = [*self.hashes, self.threads, options.threads is None, self.drafter, *policy, *where]
        if options.measure or any(accelerators.values()):
            return measured_rates(self.bundle.folder.name, facts, fitting, rate_of, options.notify).fastest
        kept = kept_rates(facts, fitting)
        return max(fitting, key=self._computed_rate) if kept is None else kept.fastest

    def _computed_rate(self, kind: BackendKind) -> float:
        """Returns the expected tokens per second by the sizes of the bundle's files; opens nothing."""
        costs = computed_costs(self.bundle.manifest, CARDS[kind].format, self.drafter or "dense", variant())
        return rate_with(CostCurve(costs), self.bundle, self.settings, drafts=self.drafter != "none")

    def load(self, choice: BackendChoice, count: int) -> Sessions:
        """Loads the bundle for `count` requests at once. Raises RequestError for options that the backend does not have."""
        kind, settings, options = backend_of(choice), self.settings, self.options
        request = replace(self._request(count), device=device_of(choice)) if self.auto else self._request(count)
        check_options(kind, request)
        opened = self._trusted(kind, request)
        if (sentence := degradation(opened.exported_parity, self.bundle.folder.name)) is not None and first_time([kind, *self.hashes]):
            options.notify(sentence)
        pair = self._measured_pair(opened)
        computed = computed_costs(self.bundle.manifest, CARDS[kind].format, opened.drafter_kind, opened.row_kernels)
        # Computed costs hold for the processor only, so an accelerator's are always measured.
        measure = options.measure or self.auto or opened.accelerator is not None
        costs = PairCosts(pair, computed, options.power, options.notify, measure=measure, waiting=options.waiting)
        if settings.needs_costs and (count > 1 or measure):
            costs()  # measuring empties the cache, so it is done before any request runs
        # A pair drafts the same on all machines, but not on all backends, because their weights differ.
        facts, answer_facts = [kind, opened.drafter_kind, *self.hashes], [*map(str, opened.answer_facts)]
        shared = SessionParts(
            bundle=self.bundle,
            generation=self.bundle.manifest.generation,
            target=opened.batch.targets[0],
            drafter=opened.drafters[0],
            vocabulary=opened.vocabulary,
            drafter_kind=opened.drafter_kind,
            backend=kind,
            row_kernels=opened.row_kernels,
            device=opened.accelerator.name if opened.accelerator else CPU,
            stock_attention=opened.stock_attention,
            settings=settings,
            monitor=self.monitor,
            costs=costs,
            keep_costs=costs.keep,
            acceptance_cache=AcceptanceCache(facts, exported=exported_counts(self.bundle.manifest, opened.exported_parity)),
            encoder=opened.encoder,
            prompt_cache=self._opened_prompt_cache(self._row_facts(kind, opened)),
            fingerprint=entry_key([project_version(), cpu_identity(), str(settings.context), self.hashes, answer_facts]),
        )
        sessions = [
            Session(replace(shared, target=target, drafter=drafter, claim=CacheClaim()))
            for target, drafter in zip(opened.batch.targets, opened.drafters, strict=True)
        ]
        return Sessions(sessions, opened.batch)

    def _trusted(self, kind: BackendKind, request: OpenRequest) -> OpenedPair:
        """Opens the pair. Uses an accelerator only if it computes what the CPU does; this is compared once for each driver.

        If it does not, opens the pair on the CPU, or raises BackendError if the options name this accelerator.
        """
        backend, options, rows = load_backend(kind), self.options, self.settings.longest_draft + 1
        opened = backend.open(request)
        if (accelerator := opened.accelerator) is None:
            return opened
        on_cpu = replace(request, device=None)

        def measure(*_: object) -> DeviceCheck:
            nonlocal opened
            opened.batch.close()  # both may not fit into the memory
            cpu = backend.open(replace(on_cpu, drafter=opened.drafter_kind))
            reference = answers(cpu.batch.targets[0], cpu.drafters[0], rows)
            cpu.batch.close()
            opened = backend.open(request)
            pair = opened.batch.targets[0], opened.drafters[0]
            manifest, parity = self.bundle.manifest, opened.exported_parity
            routed, rounded = bool(manifest.architecture.experts), is_rounded(manifest, CARDS[kind].format)
            return compared(accelerator.name, reference, *pair, longest=rows, parity=parity, routed=routed, rounded=rounded)

        drafter = opened.drafter_kind, type(opened.drafters[0]).__name__  # of one kind, there is a class on the device and one off it
        facts = [kind, accelerator.name, accelerator.driver, self.settings.context, *drafter, project_version(), *self.hashes]
        key = entry_key([cpu_identity(), *map(str, facts)])
        if (known := CHECKS.known(key)) is not None:
            check = known.value
        else:
            check = CHECKS.known_or_measured(key, measure, options.notify, waiting=options.waiting)
            if check.passed:
                options.notify(f"{check.sentence()}.")
        if check.passed:
            return opened
        opened.batch.close()
        if request.device not in KINDS:
            raise BackendError(f"{check.sentence()}; leave --device out, or update its driver")
        options.notify(f"{check.sentence()}, so this runs on the CPU.")
        return backend.open(on_cpu)

    def _request(self, count: int) -> OpenRequest:
        options, settings = self.options, self.settings
        limit = settings.memory_limit if options.memory_limit is None else memory_bytes(options.memory_limit)
        return OpenRequest(
            bundle=self.bundle,
            settings=settings,
            sequences=count,
            threads=self.threads,
            drafter=self.drafter,
            kv_type=options.kv_type or (None if settings.kv_type == DEFAULT_KV_TYPE else settings.kv_type),
            memory_limit=limit,
            image_rows=options.image_rows,
            device=None if self.auto else options.device,
            notify=options.notify,
            waiting=options.waiting,
            packed_cache=user_cache(options.notify, checked=options.check != "none") if options.packed_cache else None,
        )

    def _measured_pair(self, opened: OpenedPair) -> MeasuredPair:
        """Returns the pair to measure, with its best thread counts unless the options give a number."""
        pair = MeasuredPair(
            target=opened.batch.targets[0],
            drafter=opened.drafters[0],
            token=max(opened.vocabulary.bos, 0),
            rows=self.settings.longest_draft + 1,
            objective=self.settings.objective,
            slowdown=self.settings.slowdown,
            facts=(*self.hashes, self.threads, *opened.speed_facts),
        )
        if opened.set_threads is None:
            return pair
        if self.options.threads is not None:
            return replace(pair, facts=(*pair.facts, ThreadCounts.same(self.threads)))
        options = self.options
        return on_best_threads(pair, opened.set_threads, options.notify, measure=options.measure, waiting=options.waiting)

    def _row_facts(self, kind: BackendKind, opened: OpenedPair) -> dict[str, str]:
        target = opened.batch.targets[0]
        kernels = entry_key([project_version(), cpu_identity(), [*map(str, opened.row_kernel_facts)]])
        return row_facts(target, entry_key(self.hashes), kind, kernels) if isinstance(target, SavableTarget) else {}

    def _opened_prompt_cache(self, facts: dict[str, str]) -> PromptCache | None:
        options = self.options
        if options.prompt_cache is None or not facts:
            return None
        limit = memory_bytes(options.prompt_cache_limit)
        return PromptCache(Path(options.prompt_cache), facts, limit=limit, notify=options.notify)

    def _check_energy(self) -> None:
        """Raises RequestError if joules cannot be minimized: with another policy, or if the power of each phase is unknown."""
        if not self.settings.needs_costs:
            raise RequestError(f"the objective energy needs the policy {DEFAULT_POLICY}, not {self.settings.policy}; change one of them")
        if self.options.power is None:
            raise RequestError(
                "the objective energy needs the power of each phase, and there is no usable energy meter here (edge-devices meters) and no"
                " file of calibrated watts; give --phase-power FILE, or use the objective time"
            )


@functools.cache
def project_version() -> str:
    """Returns the installed version of this project; an empty string in device packages."""
    return installed_version("edge-mtp") or ""
