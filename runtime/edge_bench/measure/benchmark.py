"""Runs a benchmark request. Yields a header, and then each record as soon as it is measured."""

from __future__ import annotations

import datetime
import secrets
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any, TypeVar

from edge_bench.measure.energy import energy_workloads
from edge_bench.measure.memory import measure_memory
from edge_bench.measure.progress import duration
from edge_bench.measure.records import (
    BASELINE,
    FIXED,
    NO_ROW_KERNELS,
    OURS,
    SCHEMA,
    CostRecord,
    Header,
    ModelFile,
    Note,
    Record,
    Run,
    Variant,
    edge_variants,
    peer_variants,
)
from edge_bench.measure.request import BenchRequest, Prompt, prepare
from edge_bench.measure.runners import DOMAINS_PART, EdgeRunner, Runner, Schedule, context_schedule, llama_tools, mixed
from edge_bench.measure.sweeps import alone, check_sizes, image_workloads, measure_image, measure_kv_types, run_level
from edge_devices.energy.protocol import Workload
from edge_devices.machine.detection import detect_device
from edge_devices.machine.device_package import installed_version
from edge_devices.machine.system import System, WallClock
from edge_runtime.backends.interface import CPU
from edge_runtime.backends.selection import CARDS, has_options, usable_backends
from edge_runtime.bundle.bundle import Bundle, exported_quality, open_bundle
from edge_runtime.calibration.first_use import TEXT, measure_costs
from edge_runtime.config.settings import load_settings
from edge_runtime.drafting.cost_model import MIN_SECONDS
from edge_runtime.drafting.policies import DrafterKind
from edge_runtime.errors import RequestError
from edge_runtime.media.encoder_inputs import DEFAULT_BUDGET
from edge_runtime.session.load_options import LoadOptions
from edge_runtime.session.open import default_threads, faster_backend, open_session, open_sessions

# The distributions of the backends' engines.
ENGINES = ("llama-cpp-python", "onnxruntime")


def new_header(bundle: Bundle, settings: Mapping[str, Any], *, planned: int | None = None, row_kernels: str | None = None) -> Header:
    """Returns the header of a measurement that begins now on this machine. `planned` and `row_kernels` are as in `Header`.

    It has no names of people or machines, no serial numbers, and only the last part of each path.
    """
    source, device = bundle.manifest.sources.get("target"), detect_device(System())
    return Header(
        schema=SCHEMA,
        version=version("edge-mtp"),
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        bundle=bundle.folder.resolve().name,
        target=PurePath(source.origin).name if source else "",
        files=tuple(
            ModelFile(role=file.role, format=file.format, quantization=file.quantization, bytes=file.bytes, sha256=file.sha256)
            for file in bundle.manifest.files
        ),
        machine=asdict(device.machine) | {"model": device.model, "soc": device.soc},
        settings=dict(settings),
        engines={name: number for name in ENGINES if (number := installed_version(name))},
        planned=planned,
        row_kernels=row_kernels,
        run=secrets.token_hex(8),
    )


Counted = TypeVar("Counted")
LONG_SECONDS = 300


class Benchmark:
    """Runs a request. Raises the errors of opening a bundle and of decoding. Records that were yielded before remain valid."""

    def __init__(self, bundle: Path, request: BenchRequest, load: LoadOptions) -> None:
        """Reads the bundle and its settings; does not open the model yet."""
        self._folder, self._request = bundle, request
        self._bundle = open_bundle(bundle, check=load.check, public_key=load.public_key)
        self._threads = request.threads or default_threads()
        if request.tools is not None and not self._bundle.has("target", "gguf"):
            raise RequestError(f"--against runs GGUF files and {bundle} has none; export the bundle again with --format both")
        load = replace(load, threads=self._threads, check="none", public_key=None)
        special = bool(request.kv_types or request.concurrency)
        self._backend = usable_backends(self._bundle, load.backend)[0] if special else faster_backend(bundle, load)
        options, sequences = ["kv_type"] if request.kv_types else [], 2 if request.concurrency else 1
        if not has_options(self._backend, options, sequences=sequences):
            raise RequestError("--kv-types and --concurrency need the llama backend; choose it, or leave them out")
        self._settings = load_settings(self._bundle, config=load.config, preset=load.preset, context=load.context, notify=load.notify)
        image_rows = max(request.image_sizes, default=DEFAULT_BUDGET)
        self._load = replace(load, context=self._settings.context, backend=self._backend, image_rows=image_rows, measure=True)

    def _with_progress(self, title: str, items: Iterable[Counted], count: int) -> Iterator[Counted]:
        """Yields the items, and shows how many are done."""
        with self._load.waiting(title) as report:
            for done, item in enumerate(items, start=1):
                yield item
                report(done / count, f"{done} of {count}")

    def records(self) -> Iterator[Record]:
        """Measures and yields each record as soon as it is complete. The first record is the header."""
        request, longest = self._request, self._settings.longest_draft
        drafters, row_kernels = self._drafters_and_kernels()
        lengths = tuple(length for length in request.lengths if length <= longest)
        wall_clock = WallClock()
        yield self._header(drafters, lengths, row_kernels)
        parity = self._bundle.manifest.parity or {}
        quality = exported_quality(parity.get("onnx") if CARDS[self._backend].format == "onnx" else parity)
        if quality is not None:
            yield Note(text=f"this bundle {quality.words}, as its export measured")
        for length in request.lengths:
            if length > longest:
                yield Note(text=f"draft length {length} is left out: longest_draft is {longest}")
        yield from self._memory(drafters)
        with ExitStack() as stack:
            edge_runners = {
                kind: EdgeRunner(stack.enter_context(open_session(self._folder, self._load, drafter=kind))) for kind in drafters
            }
            first = next(iter(edge_runners.values()))
            check_sizes(first.session, request.image_sizes)
            if self._load.device not in (None, first.session.device):
                yield Note(text=f"asked for the device {self._load.device}; it ran on {first.session.device}")
            yield first.session.row_equality(self._load.notify, self._load.waiting)
            prompts = prepare(request.prompts(), first.session)
            yield from self._compare(edge_runners, prompts, lengths)
            yield from self._costs(edge_runners)
            yield from self._contexts(edge_runners, prompts, lengths)
            yield from self._images(first)
        yield from self._concurrency(drafters[0], prompts, lengths)
        yield from self._kv_types(lengths)
        if moved := wall_clock.moved_by():
            yield Note(
                text=f"the time of day moved by {moved:+.0f} s while this ran (it was set, or the machine slept):"
                " seconds here are of another clock, but times in other logs may not fit"
            )

    def _drafters_and_kernels(self) -> tuple[tuple[DrafterKind, ...], str]:
        """Returns the kinds of drafters to measure and the row kernels in use, which only an open session knows."""
        asked = self._request.drafters
        with open_session(self._folder, self._load, drafter=asked[0] if asked else None) as session:
            return asked or (session.drafter_kind,), session.row_kernels or NO_ROW_KERNELS

    def _header(self, drafters: Sequence[DrafterKind], lengths: Sequence[int], row_kernels: str) -> Header:
        request = self._request
        settings = {
            "threads": self._threads,
            "tokens": request.tokens,
            "repeats": request.repeats,
            "warm_up": request.warm_up,
            "backend": self._backend,
            "device": self._load.device,
            "drafters": list(drafters),
            "lengths": list(lengths),
            "policies": list(request.policies),
            "session": self._settings.to_json(),
        }
        return new_header(self._bundle, settings, planned=self._planned(drafters, lengths), row_kernels=row_kernels)

    def _planned(self, drafters: Sequence[DrafterKind], lengths: Sequence[int]) -> int:
        """Returns how many measurements are planned, as `Records.measured` counts them."""
        request = self._request
        peers = len(peer_variants(lengths)) if request.tools else 0
        kinds, few = len(edge_variants(drafters, lengths, request.policies)), _few_lengths(lengths, request.policies)
        runs = (kinds + peers) * len(request.prompts()) + len(edge_variants(drafters, few, request.policies)) * len(self._fitting())
        clients = len(request.concurrency) * len(edge_variants(drafters[:1], few, request.policies))
        kv_types = len({"f16", *request.kv_types}) if request.kv_types else 0
        return request.repeats * (runs + clients + len(request.image_sizes)) + kv_types

    def _fitting(self) -> list[int]:
        """Returns the prompt lengths that fit into the context together with the new tokens."""
        return [length for length in self._request.contexts if length <= self._settings.context - self._request.tokens]

    def _memory(self, drafters: Sequence[str]) -> Iterator[Record]:
        levels = [(kind, 1) for kind in drafters] + [(drafters[0], n) for n in self._request.concurrency if n > 1]
        for kind in drafters if self._load.device not in (None, CPU) else ():
            # An accelerator's check on first use also loads the pair on the CPU. It runs here, so that the child does not measure it.
            open_session(self._folder, self._load, drafter=kind).close()
        for kind, sequences in self._with_progress("memory", levels, len(levels)):
            yield measure_memory(
                self._folder,
                backend=self._backend,
                drafter=kind,
                sequences=sequences,
                context=self._settings.context,
                threads=self._threads,
                device=self._load.device,
            )

    def _compare(self, edge_runners: dict[DrafterKind, EdgeRunner], prompts: Sequence[Prompt], lengths: Sequence[int]) -> Iterator[Record]:
        request = self._request
        variants = edge_variants(list(edge_runners), lengths, request.policies)
        runners = dict[str, Runner](edge_runners.items())
        if request.tools is not None:
            peer = llama_tools(self._bundle, request.tools, context=self._settings.context, threads=self._threads)
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

        def run(repeat: int, prompt: Prompt, variant: Variant) -> Run:
            runner = runners[first if variant == BASELINE else variant.drafter if variant.side == OURS else variant.side]
            return runner.run(variant, prompt, plan.tokens, part=plan.part, repeat=repeat)

        warm_up = plan.warm_up(self._request.warm_up)
        warm = [run(*request) for request in self._with_progress(f"{title}: warm-up", warm_up, len(warm_up))]
        if warm and plan.part == DOMAINS_PART:
            self._announce(warm, len(plan))
        for request in self._with_progress(title, plan.requests(), len(plan)):
            yield run(*request)

    def _announce(self, warm: Sequence[Run], runs: int) -> None:
        """Prints how long these runs and those with longer prompts will take, at the speed of the `warm` runs."""
        request = self._request
        seconds = statistics.mean(run.seconds + (run.first_token_seconds or 0.0) for run in warm)
        prompt_seconds = statistics.median((run.first_token_seconds or 0.0) / max(run.prompt_tokens, 1) for run in warm)
        lengths = self._fitting()
        variants = max(2, len({run.variant for run in warm if run.variant.side == OURS and run.variant.policy != FIXED}))
        longer = (request.repeats + request.warm_up / max(len(lengths), 1)) * variants
        total = runs * seconds + longer * sum(seconds + length * prompt_seconds for length in lengths)
        fewer = "; fewer: --domains code,chat --repeats 2 --contexts none" if total > LONG_SECONDS else ""
        what = f"{runs} requests, and {len(lengths)} longer prompts"
        self._load.notify(f"about {duration(total)} for {what}{fewer}; Ctrl-C keeps what is measured")

    def _costs(self, edge_runners: Mapping[DrafterKind, EdgeRunner]) -> Iterator[Record]:
        for kind, runner in edge_runners.items():
            session = runner.session
            rows = session.settings.longest_draft + 1
            with self._load.waiting(f"costs of {kind} drafts") as report:
                costs = measure_costs(session.target, session.drafter, max(session.vocabulary.bos, 0), max_rows=rows, report=report)
            step = costs.mean_step if costs.step > MIN_SECONDS else None
            yield CostRecord(drafter=kind, length=TEXT, verify_seconds=costs.verify[:rows], draft_step_seconds=step)

    def _contexts(self, edge_runners: dict[DrafterKind, EdgeRunner], prompts: Sequence[Prompt], lengths: Sequence[int]) -> Iterator[Record]:
        request, room = self._request, self._settings.context - self._request.tokens
        for length in request.contexts:
            if length > room:
                yield Note(
                    text=f"a text of {length} tokens is left out: with {request.tokens} more it does not fit into the "
                    f"context of {self._settings.context}"
                )
        fitting = self._fitting()
        if fitting:
            variants = edge_variants(list(edge_runners), _few_lengths(lengths, request.policies), request.policies)
            plan = context_schedule(prompts, variants, fitting, repeats=request.repeats, tokens=request.tokens)
            yield from self._run(plan, dict[str, Runner](edge_runners.items()), "lengths of the text")

    def _images(self, runner: EdgeRunner) -> Iterator[Record]:
        sizes = self._request.image_sizes
        if not sizes:
            return
        # Repeat 0 is the warm-up, which loads the encoder.
        order = [(repeat, size) for repeat in range(self._request.repeats + 1) for size in mixed(sizes, repeat)]
        for repeat, budget in self._with_progress("images", order, len(order)):
            cost = measure_image(runner.session, budget, repeat)
            if repeat:
                yield cost

    def _concurrency(self, drafter: DrafterKind, prompts: Sequence[Prompt], lengths: Sequence[int]) -> Iterator[Record]:
        request = self._request
        if not request.concurrency:
            return
        variants = edge_variants([drafter], _few_lengths(lengths, request.policies), request.policies)
        with open_session(self._folder, self._load, drafter=drafter) as session, self._load.waiting("outputs of a single session"):
            expected = alone(session, prompts, request.tokens)
        for clients in request.concurrency:
            with open_sessions(self._folder, clients, self._load, drafter=drafter) as sessions:
                turns = range(-1, request.repeats)  # repeat -1 is the warm-up
                order = [(repeat, variant) for repeat in turns for variant in mixed(variants, repeat + 1)]
                for repeat, variant in self._with_progress(f"{clients} at once", order, len(order)):
                    level = run_level(sessions, variant, prompts, expected, request.tokens, repeat=max(repeat, 0))
                    if repeat >= 0:
                        yield level

    def _kv_types(self, lengths: Sequence[int]) -> Iterator[Record]:
        request = self._request
        if not request.kv_types:
            return

        with self._load.waiting("types of KV cache"):
            yield from measure_kv_types(
                self._folder,
                [prompt.text for prompt in request.prompts()],
                kv_types=request.kv_types,
                max_tokens=request.tokens,
                draft_length=_middle(lengths) or min(3, self._settings.longest_draft),
                threads=self._threads,
                context=self._settings.context,
                notify=self._load.notify,
            )

    def energy_workloads(self, stack: ExitStack) -> dict[str, Workload]:
        """Opens sessions, which `stack` closes, and returns the workloads of the energy protocol."""
        request = self._request
        drafters, _ = self._drafters_and_kernels()
        edge_runners = {kind: EdgeRunner(stack.enter_context(open_session(self._folder, self._load, drafter=kind))) for kind in drafters}
        session = next(iter(edge_runners.values())).session
        check_sizes(session, request.image_sizes)
        lengths = tuple(length for length in request.lengths if length <= self._settings.longest_draft)
        prompts = prepare(request.prompts(), session)
        variants = edge_variants(drafters, _few_lengths(lengths, request.policies), request.policies)
        images = image_workloads(session, request.image_sizes)
        long = [length for length in request.contexts if length < self._settings.context]
        return images | energy_workloads(dict[str, EdgeRunner](edge_runners.items()), variants, prompts, request.tokens, long)


def _middle(lengths: Sequence[int]) -> int:
    return lengths[len(lengths) // 2] if lengths else 0


def _few_lengths(lengths: Sequence[int], policies: Sequence[str]) -> Sequence[int]:
    """Returns the fixed lengths for a short measurement: none if policies are measured, otherwise only the middle one."""
    return () if policies or not lengths else (_middle(lengths),)
