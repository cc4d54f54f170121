"""Compares this program with llama.cpp and LiteRT-LM on the same pair, prompts and processors: first token, tokens per second, what drafts
bring. All sides in turn in one run, each engine in a process of its own.

    make llama-cpp
    .venv/bin/python scripts/benchmarks/bench_peers.py --runs peers.jsonl --json peers.json
    sh scripts/setup/build_peers.sh /tmp/peers                     # once: LiteRT-LM and its files
    .venv/bin/python scripts/benchmarks/bench_peers.py /tmp/peers/bundle --peers /tmp/peers --runs peers.jsonl --json peers.json
    .venv/bin/python scripts/benchmarks/bench_peers.py --report peers.jsonl

Without a BUNDLE, the reference pair is widened and exported to build/wide first. Tools of llama.cpp that are missing are built;
llama-cpp-python loads the same libraries as the tools. Run it on a quiet machine and quote the ratios.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from edge_bench.measure.records import (
    BASELINE,
    DEFAULT,
    FIXED,
    LLAMA_CPP,
    OURS,
    PLAIN,
    SCHEMA,
    Header,
    ModelFile,
    Note,
    Record,
    RecordFile,
    Run,
    Variant,
    parse_names,
    read_records,
)
from edge_bench.measure.request import DOMAINS, Prompt
from edge_bench.measure.runners import CONTEXTS_PART, DOMAINS_PART, Runner, Schedule, llama_tools
from edge_bench.report.figures import Figures, Row, figures, first_token_ratio
from edge_bench.report.tables import machine_line, milliseconds, ratio_text, share
from edge_devices.command_line import one_sentence_errors
from edge_devices.files.atomic_write import write_text
from edge_devices.files.typed_json import from_json, to_json
from edge_devices.machine.facts import read_machine
from edge_devices.machine.load import LoadWatch, load_now
from edge_runtime.bundle.bundle import Bundle, open_bundle
from edge_runtime.drafting.policies import DEFAULT_POLICY
from edge_runtime.errors import BackendError
from edge_runtime.session.open import default_threads

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "exporter" / "edge_export" / "reference_pair"
EDGE_EXPORT = [sys.executable, "-c", "from edge_export.cli.command import main; main(prog_name='edge-export')"]
# This program on llama.cpp's engine, where OURS is the one on onnxruntime.
OURS_LLAMA = f"{OURS} on llama.cpp"


def run(command: Sequence[str | Path]) -> None:
    """Runs a command; its messages go to standard error. Raises ClickException if it fails."""
    done = subprocess.run([str(part) for part in command], cwd=ROOT, stdout=sys.stderr, check=False)
    if done.returncode:
        raise click.ClickException(f"{' '.join(map(str, command[:4]))} ended with exit code {done.returncode}")


def tools_folder(tools: Path) -> Path:
    """Returns the folder of llama.cpp's tools; builds them if they are missing."""
    if not (tools / "llama-speculative-simple").is_file():
        run(["sh", ROOT / "scripts" / "setup" / "build_llama_cpp.sh", Path(sys.prefix), "tools"])
    return tools.resolve()


def wide_bundle(folder: Path) -> Path:
    """Returns the bundle of the widened reference pair, for both backends; makes it if it is missing."""
    bundle = folder / "bundle"
    if not bundle.is_dir():
        widen = [sys.executable, ROOT / "scripts" / "pairs" / "widen_pair.py", PAIR, "-o", folder / "pair"]
        run([*widen, "--intermediate", "49152", "--vocabulary", "65536"])
        run([*EDGE_EXPORT, "pair", folder / "pair" / "target", folder / "pair" / "drafter", "-o", bundle, "--format", "both"])
    return bundle


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
        return (
            f"it ended with exit code {self._process.wait()}: {next((line for line in reversed(lines) if line.strip()), 'nothing')[:200]}"
        )

    def close(self) -> None:
        """Ends the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # it has ended, and what it did not read is lost
                pipe.close()
        self._process.wait()


@dataclass(frozen=True, kw_only=True)
class Side:
    """One engine with its files: what decodes, how it is named, and the ways in which it decodes; the first is plain."""

    name: str
    runner: Runner
    version: str
    flags: str
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
        flags = f"{own.target.stem} and {own.drafter.stem}, {self.threads} threads, {repacked}, greedy"
        return Side(name=LLAMA_CPP, runner=own, version=f"llama.cpp {own.build()}", flags=flags, variants=variants)

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
    return Side(name=name, runner=process, version=process.about["version"], flags=process.about["flags"], variants=variants)


def header(bundle: Bundle, sides: Sequence[Side], settings: dict[str, Any]) -> Header:
    """Returns the header of the records: machine, files, versions and flags of all sides."""
    files = bundle.manifest.files
    return Header(
        schema=SCHEMA,
        version=version("edge-mtp"),
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        bundle=bundle.folder.name,
        target="",
        files=tuple(ModelFile(role=f.role, format=f.format, quantization=f.quantization, bytes=f.bytes) for f in files),
        machine=asdict(read_machine()),
        settings=settings | {"flags": {side.name: side.flags for side in sides}},
        engines={side.name: side.version for side in sides},
    )


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


def decode_table(result: Figures) -> str:
    """A line per side and way of decoding: tokens per second, over our plain, accepted, and our default over it."""
    ours = next((row.variant for row in result.overall if row.variant.side == OURS and row.variant.policy == DEFAULT_POLICY), None)
    over = {pair.peer: pair.ratio for pair in result.against if pair.ours == ours}
    lines = ["| engine | drafts | tok/s | over our plain [95%] | accepted | our default over it [95%] |", "|:--|:--|--:|--:|--:|--:|"]
    for row in result.overall:
        speeds = f"{row.tokens_per_second:.1f} | {ratio_text(row.speed_up)} | {share(row.acceptance_rate)}"
        lines.append(f"| {row.variant.side} | {drafts(row)} | {speeds} | {ratio_text(over.get(row.variant))} |")
    return "\n".join(lines)


def drafts(row: Row) -> str:
    """Returns how many drafts a row's variant makes."""
    return f"{row.variant.length}" if row.variant.policy == FIXED else "none" if row.variant.policy == PLAIN else row.variant.policy


def first_token_table(result: Figures) -> str:
    """A line per side: milliseconds until the first token of each prompt length, with how many times as early ours comes."""
    rows = {(row.variant.side, row.domain or ""): row for row in result.by_context if row.variant.policy == PLAIN}
    lengths = list(dict.fromkeys(length for _, length in rows))
    runs = [run for run in result.records.runs if run.part == CONTEXTS_PART and run.variant.policy == PLAIN]
    head = " | ".join(
        f"{rows[side, length].prompt_tokens:g} tokens, ms | ours is earlier by [95%]" for side, length in rows if side == OURS
    )
    lines = [f"| engine | {head} |", "|:--|" + "--:|" * (2 * len(lengths))]
    for side in dict.fromkeys(side for side, _ in rows):
        cells = []
        for length in lengths:
            row = rows.get((side, length))
            ours, theirs = ([run for run in runs if (run.variant.side, run.domain) == (each, length)] for each in (OURS, side))
            earlier = None if side == OURS else first_token_ratio(ours, theirs)
            cells += [milliseconds(row.first_token_seconds if row else None), ratio_text(earlier)]
        lines.append(f"| {side} | {' | '.join(cells)} |")
    return "\n".join(lines)


def report_text(result: Figures) -> str:
    """Returns versions, tables and notes as Markdown."""
    about, flags = result.records.header, result.records.header.settings.get("flags", {})
    engines = [f"- {name}: {number}; {flags.get(name, '')}" for name, number in about.engines.items()]
    tables = [table(result) for table, rows in ((decode_table, result.overall), (first_token_table, result.by_context)) if rows]
    parts = [machine_line(replace(about, engines={})), "\n".join(engines), *tables, "\n".join(f"- {text}" for text in result.records.notes)]
    return "\n\n".join(part for part in parts if part)


def to_numbers(option: str) -> tuple[int, ...]:
    """Returns the numbers of a comma-separated list; "none" is none."""
    return () if option == "none" else tuple(int(part) for part in option.split(","))


class _Numbers(click.ParamType[tuple[int, ...]]):
    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return value if isinstance(value, tuple) else to_numbers(value)
        except ValueError:
            self.fail(f"{value!r} is no list of numbers such as 64,512, nor none", param, ctx)


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False), required=False)
@click.option(
    "--tools", type=click.Path(path_type=Path), default=ROOT / "build" / "llama.cpp" / "bin", help="Folder of llama.cpp's binaries."
)
@click.option("--peers", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Also measure the engines in this folder.")
@click.option("--domains", default=",".join(DOMAINS), help="Shipped prompt sets to use.")
@click.option("--lengths", type=_Numbers(), default="3", help="Fixed draft lengths of this program, or none.")
@click.option("--prompt-lengths", type=_Numbers(), default="64,512,1000", help="Prompt lengths for the first token, in tokens, or none.")
@click.option("--max-tokens", "-n", type=click.IntRange(2, 512), default=64, help="Tokens to generate per request.")
@click.option("--repeats", type=click.IntRange(1), default=3, help="Number of repeats; every second one runs in reverse order.")
@click.option("--threads", "-t", type=click.IntRange(1), help="Threads of every engine.  [default: all processors]")
@click.option("--runs", type=click.Path(path_type=Path, dir_okay=False), help="Measure, and write the measurements here.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures here.")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Measure nothing; print the tables of this file.")
@one_sentence_errors()
def main(
    bundle: Path | None, tools: Path, peers: Path | None, runs: Path | None, json_path: Path | None, report: Path | None, **sizes: Any
) -> None:
    """Compare this program's first token and speed with those of other engines, on BUNDLE."""
    if (runs is None) == (report is None):
        raise click.UsageError("give --runs FILE to measure, or --report FILE")
    if runs is not None:
        measure(bundle.resolve() if bundle else wide_bundle(ROOT / "build" / "wide"), tools_folder(tools), peers, runs, **sizes)
    result = figures(read_records(runs or report or Path()))
    if json_path is not None:
        write_text(json_path, [json.dumps(result.to_json(), indent=1, allow_nan=False), "\n"])
    click.echo(report_text(result))


def measure(
    folder: Path,
    tools: Path,
    peers: Path | None,
    runs: Path,
    *,
    domains: str,
    lengths: tuple[int, ...],
    prompt_lengths: tuple[int, ...],
    max_tokens: int,
    repeats: int,
    threads: int | None,
) -> None:
    """Measures all sides and writes their records."""
    bundle, longest, sets = open_bundle(folder, check="none"), max(prompt_lengths, default=0), parse_names(domains, DOMAINS, "domain")
    before, watch = load_now(), LoadWatch()
    with tempfile.TemporaryDirectory(prefix=f"{runs.name}.", dir=runs.resolve().parent) as logs, RecordFile(runs) as file:
        with ExitStack() as stack:
            context = -(-(longest + max_tokens + 256) // 256) * 256
            every = Peers(stack=stack, logs=Path(logs), threads=threads or default_threads(), context=context)
            ours = every.edge(OURS, folder, "onnx", lengths)
            sides = [ours, every.edge(OURS_LLAMA, folder, "llama", (), LLAMA_CPP_LIB_PATH=str(tools)), every.llama_cpp(tools, bundle)]
            sides += every.others(peers) if peers is not None else ()
            settings = {"threads": every.threads, "tokens": max_tokens, "repeats": repeats, "context": context}
            file.add(header(bundle, sides, settings))
            assert isinstance(ours.runner, PeerProcess)
            asked = ours.runner.ask({"domains": sets, "per_domain": 1, "lengths": list(prompt_lengths)})
            prompts = tuple(from_json(Prompt, each, "prompt") for each in asked["prompts"])
            short = len(prompts) - len(prompt_lengths)
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
