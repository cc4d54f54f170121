"""Compares this program with llama.cpp and LiteRT-LM on the same pair, prompts and processors: first token, tokens per second, what drafts
bring. All sides in turn in one run, each engine in a process of its own.

    make llama-cpp
    sh scripts/setup/build_peers.sh /tmp/peers                     # once: LiteRT-LM, its files and ours
    .venv/bin/python scripts/benchmarks/bench_peers.py /tmp/peers/bundle --peers /tmp/peers --runs peers.jsonl
    .venv/bin/python scripts/benchmarks/bench_peers.py --report peers.jsonl

llama-cpp-python loads the same libraries as llama.cpp's tools. Run it on a quiet machine and quote the ratios.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from edge_bench.measure.benchmark import new_header
from edge_bench.measure.records import (
    BASELINE,
    DEFAULT,
    FIXED,
    LLAMA_CPP,
    OURS,
    PLAIN,
    Note,
    Record,
    RecordFile,
    Run,
    Variant,
    parse_names,
    parse_numbers,
    read_records,
)
from edge_bench.measure.request import DOMAINS, Prompt
from edge_bench.measure.runners import CONTEXTS_PART, DOMAINS_PART, Runner, Schedule, llama_tools
from edge_bench.report.figures import Figures, figures, first_token_ratio
from edge_bench.report.tables import TextTable, grid, milliseconds, print_report, print_tables, ratio_text
from edge_devices.command_line import one_sentence_errors
from edge_devices.files.typed_json import from_json, to_json
from edge_devices.machine.processors import LoadWatch, load_now
from edge_runtime.bundle.bundle import Bundle, open_bundle
from edge_runtime.drafting.policies import DEFAULT_POLICY
from edge_runtime.errors import BackendError
from edge_runtime.session.open import default_threads

ROOT = Path(__file__).resolve().parents[2]
# This program on llama.cpp's engine, where OURS is the one on onnxruntime.
OURS_LLAMA = f"{OURS} on llama.cpp"


class PeerProcess:
    """An engine in a process of its own, which answers requests (peer_protocol.py). `about` is what it says of itself."""

    def __init__(self, name: str, command: Sequence[str | Path], log: Path, **environment: str) -> None:
        """Starts it and waits until it has opened its model. Raises BackendError if it ends instead."""
        self._name, self._log = name, log
        paths = [str(Path(__file__).parent), *([] if str(command[0]) != sys.executable else sys.path)]
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
            )
        try:
            self.about = self._reply()
        except BackendError:
            self.close()
            raise

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request. Raises BackendError for one that failed."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: no reply will come
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._reply()

    def run(self, variant: Variant, prompt: Prompt, tokens: int, *, part: str = DOMAINS_PART, repeat: int = 0) -> Run:
        """Decodes greedily, as `Runner.run`."""
        reply = self.ask({"variant": to_json(variant), "prompt": to_json(prompt), "tokens": tokens})
        place = {"part": part, "domain": prompt.domain, "prompt": prompt.number, "repeat": repeat, "variant": to_json(variant)}
        return from_json(Run, reply | place, self._name)

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" in reply:
            raise BackendError(f"{self._name}: {reply['error']}")
        return reply

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "nothing")
        return f"it ended with exit code {self._process.wait()}: {last[:200]}"

    def close(self) -> None:
        """Ends the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # it has ended, and what it did not read is lost
                pipe.close()
        self._process.wait()


@dataclass(frozen=True, kw_only=True)
class Side:
    """One engine with its files: what decodes, its name, version and flags, and the ways in which it decodes; the first is plain."""

    name: str
    runner: Runner
    about: str
    variants: tuple[Variant, ...]


@dataclass
class Peers:
    """Starts the sides of a comparison. What cannot be started, or was not asked for, is a note."""

    stack: ExitStack
    logs: Path
    threads: int
    context: int
    notes: list[str] = field(default_factory=list)

    def worker(self, name: str, python: Path, module: str, *arguments: str | Path, **environment: str) -> PeerProcess:
        """Starts a worker. Raises BackendError if it does not open its model."""
        sizes = ["--threads", str(self.threads), "--context", str(self.context)]
        command = [python, "-c", f"import peer_protocol; peer_protocol.main({module!r})", *arguments, *sizes]
        process = PeerProcess(name, command, self.log(name), **environment)
        self.stack.callback(process.close)
        return process

    def log(self, name: str) -> Path:
        """Returns the path of a side's log."""
        return self.logs / f"{name.replace(' ', '-')}.log"

    def edge(self, name: str, bundle: Path, backend: str, lengths: Sequence[int], **environment: str) -> Side:
        """Returns this program on a backend: plain, its default policy and fixed lengths."""
        process = self.worker(name, Path(sys.executable), "peer_edge_mtp", bundle, "--backend", backend, **environment)
        drafter = process.about["drafter"]
        plain = BASELINE if name == OURS else Variant(side=name, drafter="none", policy=PLAIN)
        fixed = [Variant(side=name, drafter=drafter, policy=FIXED, length=length) for length in lengths]
        return _side(name, process, (plain, Variant(side=name, drafter=drafter, policy=DEFAULT_POLICY), *fixed))

    def llama_cpp(self, tools: Path, bundle: Bundle) -> Side:
        """Returns llama.cpp's tools: llama-bench for plain decoding, and the default of its speculative tool."""
        own = llama_tools(bundle, tools, context=self.context, threads=self.threads)
        repacked = "repacked" if own.repack else "not repacked, of which this build dies here"
        variants = tuple(
            Variant(side=LLAMA_CPP, drafter=drafter, policy=policy) for drafter, policy in (("none", PLAIN), ("dense", DEFAULT))
        )
        about = f"llama.cpp {own.build()}; {own.target.stem} and {own.drafter.stem}, {self.threads} threads, {repacked}, greedy"
        return Side(name=LLAMA_CPP, runner=own, about=about, variants=variants)

    def others(self, folder: Path) -> Iterator[Side]:
        """Yields the sides whose environment and files are in the folder of scripts/setup/build_peers.sh."""
        for kind in ("int4", "int8"):
            name, model = f"LiteRT-LM {kind}", f"litert-lm-{kind}/model.litertlm"
            if not (folder / model).exists():
                self.notes.append(f"{name} was not measured: {folder} has no {model}; run scripts/setup/build_peers.sh {folder}")
                continue
            try:
                process = self.worker(name, folder / "env" / "bin" / "python", "peer_litert_lm", folder / model)
            except (BackendError, OSError) as error:
                self.notes.append(f"{name} was not measured: {error}")
                continue
            yield _side(name, process, tuple(Variant(side=name, drafter="none", policy=policy) for policy in (PLAIN, DEFAULT)))


def draft_notes(every: Peers, sides: Sequence[Side]) -> Iterator[str]:
    """Yields the share of accepted drafts that LiteRT-LM writes to its log when it ends, of all its requests together."""
    for side in sides:
        log = every.log(side.name)
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        rates = re.findall(r"MTP Drafter - Success rate: ([\d.]+)", text)
        if rates:
            yield f"{side.name} accepted {float(rates[-1]):.1%} of its drafts, by its log"


def _side(name: str, process: PeerProcess, variants: tuple[Variant, ...]) -> Side:
    return Side(name=name, runner=process, about="{version}; {flags}".format(**process.about), variants=variants)


def measured(sides: Sequence[Side], plans: Sequence[Schedule], warm_up: int) -> Iterator[Record]:
    """Yields the runs of all sides in turn, as planned. A side that fails is left out from then on, with a note."""
    runners = {variant: side for side in sides for variant in side.variants}
    failed: set[str] = set()
    for plan in plans:
        requests = [(False, request) for request in plan.warm_up(warm_up)] + [(True, request) for request in plan.requests()]
        with click.progressbar(requests, label=plan.part, file=sys.stderr) as shown:
            for counts, (repeat, prompt, variant) in shown:
                side = runners[variant]
                if side.name in failed:
                    continue
                try:
                    record = side.runner.run(variant, prompt, plan.tokens, part=plan.part, repeat=repeat)
                except (BackendError, ValueError) as error:
                    failed.add(side.name)
                    yield Note(text=f"{side.name} was left out after prompt {prompt.number} of {prompt.domain}: {error}")
                    continue
                if counts:
                    yield record


def first_tokens(result: Figures) -> TextTable:
    """A row per side: milliseconds until the first token of each prompt length, and how many times as early ours comes."""
    runs: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in result.records.runs:
        if run.part == CONTEXTS_PART and run.variant.policy == PLAIN:
            runs[run.variant.side, run.domain].append(run)
    cells = {}
    for row in result.by_context:
        side, length = row.variant.side, row.domain or ""
        if row.variant.policy == PLAIN:
            cells[side, f"{length} tokens, ms"] = milliseconds(row.first_token_seconds)
            if side != OURS:
                cells[side, f"{length}: ours is earlier by [95%]"] = ratio_text(first_token_ratio(runs[OURS, length], runs[side, length]))
    return grid("peers", "First token", cells)


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False), required=False)
@click.option(
    "--tools", type=click.Path(path_type=Path), default=ROOT / "build" / "llama.cpp" / "bin", help="Folder of llama.cpp's binaries."
)
@click.option("--peers", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Also measure the engine in this folder.")
@click.option("--domains", default=",".join(DOMAINS), help="Shipped prompt sets to use.")
@click.option("--lengths", default="3", help="Fixed draft lengths of this program, or none.")
@click.option("--prompt-lengths", default="64,512,1000", help="Prompt lengths for the first token, in tokens, or none.")
@click.option("--max-tokens", "-n", type=click.IntRange(2, 512), default=64, help="Tokens to generate per request.")
@click.option("--repeats", type=click.IntRange(1), default=3, help="Number of repeats; every second one runs in reverse order.")
@click.option("--threads", "-t", type=click.IntRange(1), help="Threads of every engine.  [default: all processors]")
@click.option("--runs", type=click.Path(path_type=Path, dir_okay=False), help="Measure BUNDLE, and write the measurements here.")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Measure nothing; print the tables of this file.")
@one_sentence_errors()
def main(bundle: Path | None, runs: Path | None, report: Path | None, **options: Any) -> None:
    """Compare this program's first token and speed with those of other engines, on BUNDLE."""
    if (runs is None) == (report is None) or (runs is None) != (bundle is None):
        raise click.UsageError("give BUNDLE and --runs FILE to measure, or --report FILE")
    if bundle is not None and runs is not None:
        measure(bundle.resolve(), runs, **options)
    result = figures(read_records(runs or report or Path()))
    print_report(result)
    print_tables([first_tokens(result)])


def measure(
    folder: Path,
    runs: Path,
    *,
    tools: Path,
    peers: Path | None,
    domains: str,
    lengths: str,
    prompt_lengths: str,
    max_tokens: int,
    repeats: int,
    threads: int | None,
) -> None:
    """Measures all sides and writes their records."""
    bundle, sets = open_bundle(folder, check="none"), parse_names(domains, DOMAINS, "domain")
    prompts_of, tools = parse_numbers(prompt_lengths, "prompt lengths"), tools.resolve()
    before, watch = load_now(), LoadWatch()
    with tempfile.TemporaryDirectory(prefix=f"{runs.name}.", dir=runs.resolve().parent) as logs, RecordFile(runs) as file:
        with ExitStack() as stack:
            context = -(-(max(prompts_of, default=0) + max_tokens + 256) // 256) * 256
            every = Peers(stack=stack, logs=Path(logs), threads=threads or default_threads(), context=context)
            ours = every.edge(OURS, folder, "onnx", parse_numbers(lengths, "draft lengths"))
            sides = [ours, every.edge(OURS_LLAMA, folder, "llama", (), LLAMA_CPP_LIB_PATH=str(tools)), every.llama_cpp(tools, bundle)]
            sides += every.others(peers) if peers is not None else ()
            settings = {"threads": every.threads, "tokens": max_tokens, "repeats": repeats, "context": context}
            file.add(replace(new_header(bundle, settings), engines={side.name: side.about for side in sides}))
            assert isinstance(ours.runner, PeerProcess)
            asked = ours.runner.ask({"domains": sets, "per_domain": 1, "lengths": list(prompts_of)})
            prompts = tuple(from_json(Prompt, each, "prompt") for each in asked["prompts"])
            short = len(prompts) - len(prompts_of)
            variants = tuple(variant for side in sides for variant in side.variants)
            decoding = Schedule(part=DOMAINS_PART, variants=variants, prompts=prompts[:short], repeats=repeats, tokens=max_tokens)
            # Of a long prompt's request only the first token counts; two are the fewest that all engines make.
            plain = tuple(side.variants[0] for side in sides)
            filling = Schedule(part=CONTEXTS_PART, variants=plain, prompts=prompts[short:], repeats=repeats, tokens=2)
            for record in measured(sides, [plan for plan in (decoding, filling) if plan.prompts], 1):
                file.add(record)
        # The engines have ended: their time is not that of other programs, and their logs are complete.
        loads = [("before the first run, ", before), ("", watch.load())]
        for text in [*every.notes, *draft_notes(every, sides), *(words + load.sentence() for words, load in loads if load.is_busy)]:
            file.add(Note(text=text))


if __name__ == "__main__":
    main()
