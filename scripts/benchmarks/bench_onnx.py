"""Compares bundles on ONNX Runtime with bundles on llama.cpp: loading, memory, forwards and draft steps by context, decoding with drafts.

    python scripts/pairs/widen_pair.py exporter/edge_export/reference_pair -o /tmp/wide
    edge-export pair /tmp/wide/target /tmp/wide/drafter -o /tmp/wide-bundle --format both
    python scripts/benchmarks/bench_onnx.py llama:/tmp/wide-bundle onnx:/tmp/wide-bundle --prompts prompts.json --json onnx.json

Runners take turns, in reverse order in every other round. Each load is measured in its own process. Run it on a quiet machine and quote the
ratios. For a random pair omit --prompts: its text is meaningless, but the times of forwards and draft steps are valid.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import click
from rich.console import Console
from rich.table import Table

from edge_devices.command_line import one_sentence_errors
from edge_runtime.backends.selection import BACKENDS, BackendKind
from edge_runtime.drafting.policies import Fixed
from edge_runtime.errors import BackendError
from edge_runtime.interfaces import Drafter, Target
from edge_runtime.session.open import default_threads, open_session
from edge_runtime.session.session import Session

# Rounds that are not counted: they fault pages in and start threads.
WARM_UP = 2
# Tokens of the prompt that measures memory, and free rows of the context after the longest text.
ROOM = 32
LOAD_TOKENS = 8
# Returns the representative one of several durations.
Typical = Callable[[Sequence[float]], float]


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A bundle on a backend."""

    name: str
    backend: str
    bundle: Path
    threads: int
    context: int

    def open(self, *, verbose: bool = False) -> Session:
        """Opens a session."""
        return open_session(
            self.bundle,
            backend=cast(BackendKind, self.backend),
            threads=self.threads,
            context=self.context,
            check="none",
            notify=(lambda text: click.echo(text, err=True)) if verbose else (lambda _: None),
        )


def read_runners(words: Sequence[str], threads: int, context: int) -> list[Runner]:
    """Reads BACKEND:BUNDLE."""
    made = []
    for word in words:
        backend, _, path = word.partition(":")
        if backend not in BACKENDS or not Path(path).is_dir():
            raise click.ClickException(f"{word!r} is not a backend ({', '.join(BACKENDS)}), a colon and a bundle's folder")
        name = f"{backend} {Path(path).name}"
        made.append(Runner(name=name, backend=backend, bundle=Path(path), threads=threads, context=context))
    return made


def measure_load(runner: Runner) -> dict[str, float]:
    """Measures a load in this process: seconds until the first request can run, and growth of resident bytes before and after it."""
    before = _resident()
    begin = time.perf_counter()
    with runner.open() as session:
        seconds = time.perf_counter() - begin
        opened = _resident()
        generation = session.generate([max(session.vocabulary.bos, 0)] * ROOM, max_tokens=LOAD_TOKENS, draft_length=1)
        for _ in generation.rounds():
            pass
        used = _resident()
    return {
        "seconds": seconds,
        "opened_bytes": opened[0] - before[0],
        "used_bytes": used[0] - before[0],
        "used_anonymous_bytes": used[1] - before[1],
    }


def _resident() -> tuple[int, int]:
    """The bytes of this process in memory, VmRSS and RssAnon of /proc/self/status (proc(5)): all, and those without a file behind them."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    except OSError as error:
        raise BackendError("resident memory is read from /proc, which this system does not have; omit --openings") from error
    total, anonymous = (int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon"))
    return total, anonymous


def measure_loads(runners: Sequence[Runner], repeats: int) -> dict[str, dict[str, float]]:
    """Returns medians over `repeats` loads of each runner, in turn; the first load is not counted."""
    samples: dict[str, list[dict[str, float]]] = {runner.name: [] for runner in runners}
    spawn = multiprocessing.get_context("spawn")
    for number in range(repeats + 1):
        for runner in runners:
            with spawn.Pool(1) as pool:
                measured = pool.apply(measure_load, (runner,))
            if number:
                samples[runner.name].append(measured)
    return {name: {key: statistics.median(each[key] for each in many) for key in many[0]} for name, many in samples.items()}


def in_turn(sessions: dict[str, Session], repeats: int) -> Iterator[tuple[str, Session, bool]]:
    """Yields every session `repeats` times after the warm-up, in alternating order, and whether the measurement counts."""
    for number in range(WARM_UP + repeats):
        for name in list(sessions) if number % 2 else reversed(list(sessions)):
            yield name, sessions[name], number >= WARM_UP


def fill(session: Session, length: int) -> None:
    """Fills a session's cache up to `length` rows with varying tokens."""
    target, vocabulary = session.target, session.bundle.manifest.architecture.vocab_size
    target.prefill([(17 * place) % (vocabulary - 64) + 32 for place in range(target.length, length)])


def forwards(
    sessions: dict[str, Session], context: int, row_counts: Sequence[int], draft_length: int, repeats: int, typical: Typical
) -> dict[str, dict[str, float]]:
    """Returns typical milliseconds of a verify for each row count, and of one draft step, after `context` tokens."""
    for session in sessions.values():
        fill(session, context)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in sessions}
    for name, session, counts in in_turn(sessions, repeats):
        measured = {f"verify {rows}": verify_seconds(session.target, rows, context) for rows in row_counts}
        if session.drafter is not None:
            measured["draft step"] = draft_seconds(session.target, session.drafter, draft_length, context)
        for key, seconds in measured.items() if counts else ():
            samples[name].setdefault(key, []).append(1000 * seconds)
    return {name: {key: typical(values) for key, values in by.items()} for name, by in samples.items()}


def verify_seconds(target: Target, rows: int, context: int) -> float:
    """Returns seconds of the second of two verifies, as in decoding, where a forward follows a forward."""
    seconds = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        target.verify([40 + row for row in range(rows)])
        seconds = time.perf_counter() - begin
        target.rollback(context)
    return seconds


def draft_seconds(target: Target, drafter: Drafter, draft_length: int, context: int) -> float:
    """Returns seconds per step of a draft that follows a verify."""
    target.verify([40])
    begin = time.perf_counter()
    drafted = len(drafter.draft(41, draft_length))
    seconds = (time.perf_counter() - begin) / max(1, drafted)
    target.rollback(context)
    return seconds


def texts(
    sessions: dict[str, Session], prompts: Sequence[str], lengths: Sequence[int], tokens: int, repeats: int, typical: Typical
) -> dict[str, dict[str, dict[str, float]]]:
    """Returns, for each draft length, tokens per second (geometric mean of the typical values over prompts) and the share accepted."""
    speeds: dict[tuple[str, int], dict[int, list[float]]] = {}
    counts: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for index, prompt in enumerate(prompts):
        for name, session, counted in in_turn(sessions, repeats):
            for length in lengths:
                generation = session.generate(prompt, max_tokens=tokens, policy=Fixed(length))
                for _ in generation.rounds():
                    pass
                if counted:
                    stats = generation.stats
                    speeds.setdefault((name, length), {}).setdefault(index, []).append(stats.decode_seconds / len(generation.tokens))
                    counts.setdefault((name, length), []).append((stats.drafted, stats.accepted))
    made: dict[str, dict[str, dict[str, float]]] = {name: {} for name in sessions}
    for (name, length), by_prompt in speeds.items():
        drafted, accepted = map(sum, zip(*counts[name, length], strict=True))
        mean = math.exp(-statistics.fmean(math.log(typical(values)) for values in by_prompt.values()))
        made[name][str(length)] = {"tokens_per_second": mean, "accepted": accepted / drafted if drafted else 0.0}
    return made


def table(title: str, rows: dict[str, dict[str, str]]) -> Table:
    """Returns a table with one row per runner."""
    made = Table(title=title)
    made.add_column("runner")
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    for column in columns:
        made.add_column(column, justify="right")
    for name, row in rows.items():
        made.add_row(name, *(row.get(column, "") for column in columns))
    return made


def load_table(measured: dict[str, dict[str, float]]) -> Table:
    """Returns the table of loads: seconds and megabytes."""
    rows = {
        name: {"seconds": f"{by['seconds']:.2f}"}
        | {key.removesuffix("_bytes") + " MB": f"{by[key] / 1e6:.0f}" for key in by if key != "seconds"}
        for name, by in measured.items()
    }
    return table("load", rows)


def forward_table(context: int, measured: dict[str, dict[str, float]]) -> Table:
    """Returns the table of milliseconds, with the speed relative to the first runner."""
    first = next(iter(measured.values()))
    rows = {
        name: {key: f"{value:.2f} ({first[key] / value:.2f})" if key in first else f"{value:.2f}" for key, value in by.items()}
        for name, by in measured.items()
    }
    return table(f"milliseconds after {context} tokens (speed relative to the first)", rows)


def growth_table(by_context: dict[str, dict[str, dict[str, float]]]) -> Table:
    """Returns the table of times after the longest context, relative to those after the shortest."""
    first, last = min(by_context, key=int), max(by_context, key=int)
    rows = {
        name: {key: f"{value / by_context[first][name][key]:.2f}" for key, value in by.items()} for name, by in by_context[last].items()
    }
    return table(f"milliseconds after {last} tokens relative to {first}", rows)


def text_table(measured: dict[str, dict[str, dict[str, float]]]) -> Table:
    """Returns the table of tokens per second, with the ratio to the first runner and the share of drafts accepted."""
    first = next(iter(measured.values()))
    rows = {
        name: {
            length: f"{of['tokens_per_second']:.1f} "
            f"({of['tokens_per_second'] / first[length]['tokens_per_second']:.2f}) {of['accepted']:.0%}"
            for length, of in by.items()
        }
        for name, by in measured.items()
    }
    return table("tokens per second by draft length (relative to the first), drafts accepted", rows)


@click.command(context_settings={"show_default": True})
@click.argument("words", metavar="BACKEND:BUNDLE...", nargs=-1, required=True)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: all this process may use]")
@click.option("--context", "contexts", type=click.IntRange(min=1), multiple=True, default=(512, 4096), help="Tokens before a forward.")
@click.option("--rows", default="1,2,3,4,5", help="Row counts of the forwards.")
@click.option("--draft-length", "lengths", type=click.IntRange(0, 12), multiple=True, default=(0, 1, 2, 3, 4), help="0 is plain decoding.")
@click.option("--prompts", type=click.Path(path_type=Path, exists=True, dir_okay=False), multiple=True, help="JSON lists of texts.")
@click.option("--count", type=click.IntRange(min=1), default=1, help="Prompts of each list.")
@click.option("--tokens", type=click.IntRange(min=2), default=128)
@click.option("--repeats", type=click.IntRange(min=1), default=5)
@click.option("--openings", "opening_repeats", type=click.IntRange(min=0), default=0, help="Loads of each runner that are measured.")
@click.option(
    "--statistic",
    type=click.Choice(("median", "best")),
    default="median",
    help="Representative duration; best is for a machine that is not quiet.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all figures here.")
@one_sentence_errors()
def main(
    words: tuple[str, ...],
    threads: int | None,
    contexts: tuple[int, ...],
    rows: str,
    lengths: tuple[int, ...],
    prompts: tuple[Path, ...],
    count: int,
    tokens: int,
    repeats: int,
    opening_repeats: int,
    statistic: str,
    json_path: Path | None,
) -> None:
    """Compare bundles on backends; ratios are relative to the first."""
    runners = read_runners(words, threads or default_threads(), max(contexts) + ROOM)
    row_counts = [int(part) for part in rows.split(",")]
    listed = [prompt for path in prompts for prompt in json.loads(path.read_text("utf-8"))[:count]]
    typical: Typical = statistics.median if statistic == "median" else min
    record: dict[str, Any] = {
        "statistic": statistic,
        "sides": [asdict(runner) for runner in runners],
        "forwards": {},
        "texts": {},
        "openings": {},
    }

    def keep(made: Table) -> None:
        """Prints a table and writes the record so far, as the run may be interrupted."""
        Console(width=160).print(made)
        if json_path is not None:
            json_path.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")

    if opening_repeats:
        record["openings"] = measure_loads(runners, opening_repeats)
        keep(load_table(record["openings"]))
    with ExitStack() as stack:
        sessions = {runner.name: stack.enter_context(runner.open(verbose=True)) for runner in runners}
        for context in sorted(contexts):
            measured = record["forwards"][str(context)] = forwards(sessions, context, row_counts, max([3, *lengths]), repeats, typical)
            keep(forward_table(context, measured))
        if len(contexts) > 1:
            keep(growth_table(record["forwards"]))
        if listed:
            record["texts"] = texts(sessions, listed, lengths, tokens, repeats, typical)
            keep(text_table(record["texts"]))


if __name__ == "__main__":
    main()
