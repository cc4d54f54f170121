"""Runs a benchmark request; yields its records one by one as they are measured."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Protocol, cast

from edge_bench.measure.energy import energy_workloads
from edge_bench.measure.llama_tools import llama_tools
from edge_bench.measure.memory import measure_memory
from edge_bench.measure.prompts import PreparedPrompt, Prompt, prepare
from edge_bench.measure.records import SCHEMA, CostRecord, Header, ModelFile, Note, Record
from edge_bench.measure.runners import EdgeRunner, Runner
from edge_bench.measure.schedule import DOMAINS_PART, Schedule, Step, context_schedule
from edge_bench.measure.sweeps.concurrency import alone, run_level
from edge_bench.measure.sweeps.images import check_sizes, image_workloads, measure_image
from edge_bench.measure.variants import BASELINE, OURS, edge_variants, peer_variants
from edge_devices.energy.protocol import Workload
from edge_devices.machine.facts import read_machine
from edge_devices.waiting import Report
from edge_runtime.backends.selection import BackendKind, has_options, usable_backends
from edge_runtime.bundle.bundle import Bundle, open_bundle
from edge_runtime.bundle.integrity import CheckMode
from edge_runtime.bundle.kv_types import KvType
from edge_runtime.calibration.cost_probe import TEXT, measure_costs
from edge_runtime.config.schema import SpeculativeConfig
from edge_runtime.config.settings import load_settings
from edge_runtime.drafting.cost_model import LEAST_SECONDS
from edge_runtime.drafting.drafter_kinds import DrafterKind
from edge_runtime.errors import RequestError
from edge_runtime.media.image import DEFAULT_BUDGET
from edge_runtime.session.load_options import LoadOptions
from edge_runtime.session.open import default_threads, faster_backend, open_session, open_sessions


class Progress(Protocol):
    """Receives the progress of a benchmark."""

    def begin(self, title: str, total: int) -> None:
        """Starts a part of `total` equal steps; the previous part is complete."""

    def advance(self) -> None:
        """Counts a finished step."""

    def message(self, text: str) -> None:
        """Shows a message to the user."""

    def wait(self, title: str) -> AbstractContextManager[Report]:
        """Shows a wait of seconds while a with block runs."""


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """What to measure; see `edge-bench --help`.

    `drafters` () is the default of a session; `tools` is the folder of llama.cpp's binaries.
    """

    bundle: Path
    prompts: tuple[Prompt, ...]
    drafters: tuple[DrafterKind, ...] = ()
    lengths: tuple[int, ...] = (3,)
    policies: tuple[str, ...] = ()
    repeats: int = 6
    tokens: int = 96
    warm_up: int = 1
    contexts: tuple[int, ...] = ()
    concurrency: tuple[int, ...] = ()
    kv_types: tuple[str, ...] = ()
    image_sizes: tuple[int, ...] = ()
    tools: Path | None = None
    backend: BackendKind | None = None
    threads: int | None = None
    context: int | None = None
    config: SpeculativeConfig | Path | None = None
    preset: str | None = None
    check: CheckMode = "fast"
    public_key: Path | None = None


class Benchmark:
    """Runs a request. Raises the errors of opening a bundle and of decoding; records yielded before remain valid."""

    def __init__(self, request: BenchRequest, progress: Progress) -> None:
        """Reads the bundle and its settings; does not open the model yet."""
        self._request = request
        self._progress = progress
        self._bundle = open_bundle(request.bundle, check=request.check, public_key=request.public_key)
        self._threads = request.threads or default_threads()
        if request.tools is not None and not self._bundle.has("target", "gguf"):
            raise RequestError(f"--against runs GGUF files and {request.bundle} has none; export the pair with --format both")
        special = bool(request.kv_types or request.concurrency)
        self._backend = usable_backends(self._bundle, request.backend)[0] if special else self._faster_backend()
        options, sequences = ["kv_type"] if request.kv_types else [], 2 if request.concurrency else 1
        if not has_options(self._backend, options, sequences=sequences):
            raise RequestError("--kv-types and --concurrency need the llama backend; choose it, or leave them out")
        self._settings = load_settings(
            self._bundle, config=request.config, preset=request.preset, context=request.context, notify=progress.message
        )
        self._load = LoadOptions(
            threads=self._threads,
            context=self._settings.context,
            config=request.config,
            preset=request.preset,
            check="none",
            notify=progress.message,
            waiting=progress.wait,
            backend=self._backend,
            image_rows=max(request.image_sizes, default=DEFAULT_BUDGET),
        )

    def _faster_backend(self) -> BackendKind:
        request = self._request
        return faster_backend(
            request.bundle,
            backend=request.backend,
            threads=self._threads,
            context=request.context,
            config=request.config,
            preset=request.preset,
            check="none",
            notify=self._progress.message,
            waiting=self._progress.wait,
        )

    def records(self) -> Iterator[Record]:
        """Measures and yields each record as soon as it is complete; the first is the header."""
        request, longest = self._request, self._settings.longest_draft
        drafters = request.drafters or (self._default_drafter(),)
        lengths = tuple(length for length in request.lengths if length <= longest)
        yield self._header(drafters, lengths)
        for length in request.lengths:
            if length > longest:
                yield Note(text=f"draft length {length} is left out: longest_draft is {longest}")
        yield from self._memory(drafters)
        with ExitStack() as stack:
            edge_runners = {
                kind: EdgeRunner(stack.enter_context(open_session(request.bundle, self._load, drafter=kind))) for kind in drafters
            }
            first = next(iter(edge_runners.values()))
            check_sizes(first.session, request.image_sizes)
            prompts = prepare(request.prompts, first.session)
            yield from self._compare(edge_runners, prompts, lengths)
            yield from self._costs(edge_runners)
            yield from self._contexts(edge_runners, prompts, lengths)
            yield from self._images(first)
        yield from self._concurrency(drafters[0], prompts, lengths)
        yield from self._kv_types(lengths)

    def _default_drafter(self) -> DrafterKind:
        with open_session(self._request.bundle, self._load) as session:
            return session.drafter_kind

    def _header(self, drafters: Sequence[str], lengths: Sequence[int]) -> Header:
        request, source = self._request, self._bundle.manifest.sources.get("target")
        return Header(
            schema=SCHEMA,
            version=version("edge-mtp"),
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            bundle=request.bundle.resolve().name,
            target=PurePath(source.origin).name if source else "",
            files=_files(self._bundle),
            machine=asdict(read_machine()),
            settings={
                "threads": self._threads,
                "tokens": request.tokens,
                "repeats": request.repeats,
                "warm_up": request.warm_up,
                "backend": self._backend,
                "drafters": list(drafters),
                "lengths": list(lengths),
                "policies": list(request.policies),
                "session": self._settings.to_json(),
            },
        )

    def _memory(self, drafters: Sequence[str]) -> Iterator[Record]:
        levels = [(kind, 1) for kind in drafters] + [(drafters[0], n) for n in self._request.concurrency if n > 1]
        self._progress.begin("memory", len(levels))
        for kind, sequences in levels:
            yield measure_memory(
                self._request.bundle,
                backend=self._backend,
                drafter=kind,
                sequences=sequences,
                context=self._settings.context,
                threads=self._threads,
            )
            self._progress.advance()

    def _compare(
        self, edge_runners: dict[DrafterKind, EdgeRunner], prompts: Sequence[PreparedPrompt], lengths: Sequence[int]
    ) -> Iterator[Record]:
        request = self._request
        variants = edge_variants(list(edge_runners), lengths, request.policies)
        runners = dict[str, Runner](edge_runners.items())
        if request.tools is not None:
            peer = llama_tools(next(iter(edge_runners.values())).session, request.tools, self._threads)
            variants += peer_variants(lengths)
            runners["llama.cpp"] = peer
        for prompt in prompts:
            if len(prompt.ids) + request.tokens > self._settings.context:
                raise RequestError(
                    f"prompt {prompt.number} of {prompt.domain} has {len(prompt.ids)} tokens, which with "
                    f"{request.tokens} new ones do not fit"
                    f" into the context of {self._settings.context}; shorten it or raise --context"
                )
        plan = Schedule(part=DOMAINS_PART, variants=tuple(variants), prompts=tuple(prompts), repeats=request.repeats, tokens=request.tokens)
        yield from self._run(plan, runners, "domains")

    def _run(self, plan: Schedule, runners: Mapping[str, Runner], title: str) -> Iterator[Record]:
        first = next(iter(runners))

        def runner(step: Step) -> Runner:
            variant = step.variant
            return runners[first if variant == BASELINE else variant.drafter if variant.side == OURS else variant.side]

        self._progress.begin(f"{title}: warm-up", len(plan.variants) * self._request.warm_up)
        for step in plan.warm_up(self._request.warm_up):
            runner(step).run(step.variant, step.prompt, step.tokens, step.place)
            self._progress.advance()
        self._progress.begin(title, len(plan))
        for step in plan.steps():
            yield runner(step).run(step.variant, step.prompt, step.tokens, step.place)
            self._progress.advance()

    def _costs(self, edge_runners: Mapping[DrafterKind, EdgeRunner]) -> Iterator[Record]:
        self._progress.begin("cost curve", len(edge_runners))
        for kind, runner in edge_runners.items():
            session = runner.session
            rows = session.settings.longest_draft + 1
            with self._progress.wait(f"costs of {kind} drafts") as report:
                costs = measure_costs(session.target, session.drafter, max(session.vocabulary.bos, 0), most_rows=rows, report=report)
            step = costs.mean_step if costs.step > LEAST_SECONDS else None
            yield CostRecord(drafter=kind, length=TEXT, verify_seconds=costs.verify[:rows], draft_step_seconds=step)
            self._progress.advance()

    def _contexts(
        self, edge_runners: dict[DrafterKind, EdgeRunner], prompts: Sequence[PreparedPrompt], lengths: Sequence[int]
    ) -> Iterator[Record]:
        request, room = self._request, self._settings.context - self._request.tokens
        for length in request.contexts:
            if length > room:
                yield Note(
                    text=f"a text of {length} tokens is left out: with {request.tokens} more it does not fit into the "
                    f"context of {self._settings.context}"
                )
        fitting = [length for length in request.contexts if length <= room]
        if fitting:
            variants = edge_variants(list(edge_runners), _few(lengths, request.policies), request.policies)
            plan = context_schedule(prompts, variants, fitting, repeats=request.repeats, tokens=request.tokens)
            yield from self._run(plan, dict[str, Runner](edge_runners.items()), "lengths of the text")

    def _images(self, runner: EdgeRunner) -> Iterator[Record]:
        sizes = self._request.image_sizes
        if not sizes:
            return
        self._progress.begin("images", (self._request.repeats + 1) * len(sizes))
        for repeat in range(self._request.repeats + 1):  # repeat 0 is the warm-up, which loads the encoder
            for budget in sizes if repeat % 2 == 0 else reversed(sizes):
                cost = measure_image(runner.session, budget, repeat)
                if repeat:
                    yield cost
                self._progress.advance()

    def _concurrency(self, drafter: DrafterKind, prompts: Sequence[PreparedPrompt], lengths: Sequence[int]) -> Iterator[Record]:
        request = self._request
        if not request.concurrency:
            return
        variants = edge_variants([drafter], _few(lengths, request.policies), request.policies)
        with open_session(request.bundle, self._load, drafter=drafter) as session:
            self._progress.begin("outputs of a single session", 1)
            expected = alone(session, prompts, request.tokens)
            self._progress.advance()
        for clients in request.concurrency:
            with open_sessions(request.bundle, clients, self._load, drafter=drafter) as sessions:
                self._progress.begin(f"{clients} at once", (request.repeats + 1) * len(variants))
                for repeat in range(-1, request.repeats):  # repeat -1 is the warm-up
                    for variant in variants if repeat % 2 == 0 else reversed(variants):
                        level = run_level(sessions, variant, prompts, expected, request.tokens, repeat=max(repeat, 0))
                        if repeat >= 0:
                            yield level
                        self._progress.advance()

    def _kv_types(self, lengths: Sequence[int]) -> Iterator[Record]:
        request = self._request
        if not request.kv_types:
            return
        from edge_bench.measure.sweeps.kv_types import measure_kv_types

        self._progress.begin("types of KV cache", 1)
        costs = measure_kv_types(
            request.bundle,
            [prompt.text for prompt in request.prompts],
            kv_types=cast(tuple[KvType, ...], request.kv_types),
            max_tokens=request.tokens,
            draft_length=_middle(lengths) or min(3, self._settings.longest_draft),
            threads=self._threads,
            context=self._settings.context,
            notify=self._progress.message,
        )
        self._progress.advance()
        yield from costs

    def energy_workloads(self, stack: ExitStack) -> dict[str, Workload]:
        """Opens the sessions, which `stack` closes, and returns the workloads of the energy protocol."""
        request = self._request
        drafters = request.drafters or (self._default_drafter(),)
        edge_runners = {kind: EdgeRunner(stack.enter_context(open_session(request.bundle, self._load, drafter=kind))) for kind in drafters}
        session = next(iter(edge_runners.values())).session
        check_sizes(session, request.image_sizes)
        lengths = tuple(length for length in request.lengths if length <= self._settings.longest_draft)
        prompts = prepare(request.prompts, session)
        variants = edge_variants(drafters, _few(lengths, request.policies), request.policies)
        images = image_workloads(session, request.image_sizes)
        return images | energy_workloads(dict[str, EdgeRunner](edge_runners.items()), variants, prompts, request.tokens)


def _middle(lengths: Sequence[int]) -> int:
    return lengths[len(lengths) // 2] if lengths else 0


def _few(lengths: Sequence[int], policies: Sequence[str]) -> Sequence[int]:
    """Returns no fixed length if policies are measured, else only the middle one."""
    return () if policies or not lengths else (_middle(lengths),)


def _files(bundle: Bundle) -> tuple[ModelFile, ...]:
    return tuple(ModelFile(role=f.role, format=f.format, quantization=f.quantization, bytes=f.bytes) for f in bundle.manifest.files)
