"""Sets bundles on ONNX Runtime beside bundles on llama.cpp: loading and memory, forwards and draft steps by context, text with drafts.

    python scripts/pairs/widen_pair.py exporter/edge_export/reference_pair -o /tmp/wide
    edge-export /tmp/wide/target /tmp/wide/drafter -o /tmp/wide-bundle --format both
    python scripts/benchmarks/bench_onnx.py llama:/tmp/wide-bundle onnx:/tmp/wide-bundle --prompts prompts.json --json onnx.json

Sides take turns, in each round the other way round. Each opening happens in a process of its own. Run it on a quiet machine; quote the
ratios. Text of a random pair says nothing: leave --prompts away, forwards and draft steps cost what they cost.
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
from edge_devices.machine.memory import Resident, resident_bytes
from edge_runtime.backends.selection import BACKENDS
from edge_runtime.drafting.policies import Fixed
from edge_runtime.errors import BackendError
from edge_runtime.interfaces import Drafter, Target
from edge_runtime.session.open import OpenOptions, default_threads, open_session
from edge_runtime.session.session import Session

# Rounds before those that count: pages are faulted in, threads started.
WARM_UP = 2
# Rows of one prefill call between looks at the clock, and what is kept free behind the longest text.
ROOM = 32
OPENING_TOKENS = 8
EXTRAS = {"llama": ("",), "onnx": ("", "uniform", "unpacked")}
# Of several durations the one that counts.
Typical = Callable[[Sequence[float]], float]


@dataclass(frozen=True, kw_only=True)
class Side:
    """A bundle on a backend."""

    name: str
    backend: str
    bundle: Path
    threads: int
    context: int
    extra: str = ""

    def open(self, *, say: bool = False) -> Session:
        """Opens it, on ONNX Runtime with weights kept packed unless `extra` is "unpacked"."""
        onnx = self.backend == "onnx"
        options = {
            "backend": self.backend,
            "threads": self.threads,
            "context": self.context,
            "check": "none",
            "keep_packed": onnx and self.extra != "unpacked",
            "uniform_rows": self.extra == "uniform",
            "notify": (lambda text: click.echo(text, err=True)) if say else (lambda _: None),
        }
        return open_session(self.bundle, **cast(OpenOptions, options))


def sides_of(words: Sequence[str], threads: int, context: int) -> list[Side]:
    """Reads BACKEND:BUNDLE, onnx+uniform:BUNDLE and onnx+unpacked:BUNDLE."""
    made = []
    for word in words:
        kind, _, path = word.partition(":")
        backend, _, extra = kind.partition("+")
        if backend not in BACKENDS or extra not in EXTRAS[backend] or not Path(path).is_dir():
            raise click.ClickException(f"{word!r} is no backend ({', '.join(BACKENDS)}), a colon and a bundle's folder")
        name = f"{kind} {Path(path).name}"
        made.append(Side(name=name, backend=backend, bundle=Path(path), threads=threads, context=context, extra=extra))
    return made


def opening(side: Side) -> dict[str, float]:
    """What a process of its own sees: seconds until a prompt can come, bytes that are resident before and after one."""
    before = _resident()
    begin = time.perf_counter()
    with side.open() as session:
        seconds = time.perf_counter() - begin
        opened = _resident()
        generation = session.generate([max(session.vocabulary.bos, 0)] * ROOM, max_tokens=OPENING_TOKENS, draft_length=1)
        for _ in generation.rounds():
            pass
        used = _resident()
    return {
        "seconds": seconds,
        "opened_bytes": opened.total - before.total,
        "used_bytes": used.total - before.total,
        "used_anonymous_bytes": used.anonymous - before.anonymous,
    }


def _resident() -> Resident:
    found = resident_bytes()
    if found is None:
        raise BackendError("resident memory is read from /proc, which is not here; leave --openings out")
    return found


def openings(sides: Sequence[Side], repeats: int) -> dict[str, dict[str, float]]:
    """Medians of opening each side `repeats` times, in turn; the first time, which packs weights, does not count."""
    taken: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    spawn = multiprocessing.get_context("spawn")
    for number in range(repeats + 1):
        for side in sides:
            with spawn.Pool(1) as pool:
                found = pool.apply(opening, (side,))
            if number:
                taken[side.name].append(found)
    return {name: {key: statistics.median(one[key] for one in many) for key in many[0]} for name, many in taken.items()}


def in_turn(sessions: dict[str, Session], repeats: int) -> Iterator[tuple[str, Session, bool]]:
    """Every session `repeats` times after the warm-up, each time in the other order; says whether it counts."""
    for number in range(WARM_UP + repeats):
        for name in list(sessions) if number % 2 else reversed(list(sessions)):
            yield name, sessions[name], number >= WARM_UP


def fill(session: Session, length: int) -> None:
    """Brings a session's cache to `length` rows, of tokens that differ."""
    target, vocabulary = session.target, session.bundle.manifest.architecture.vocab_size
    target.prefill([(17 * place) % (vocabulary - 64) + 32 for place in range(target.length, length)])


def forwards(
    sessions: dict[str, Session], context: int, row_counts: Sequence[int], draft_length: int, repeats: int, typical: Typical
) -> dict[str, dict[str, float]]:
    """Milliseconds of verifies of each number of rows and of one step of a draft, the typical ones, behind `context` tokens."""
    for session in sessions.values():
        fill(session, context)
    taken: dict[str, dict[str, list[float]]] = {name: {} for name in sessions}
    for name, session, counts in in_turn(sessions, repeats):
        found = {f"verify {rows}": verify_seconds(session.target, rows, context) for rows in row_counts}
        if session.drafter is not None:
            found["draft step"] = draft_seconds(session.target, session.drafter, draft_length, context)
        for key, seconds in found.items() if counts else ():
            taken[name].setdefault(key, []).append(1000 * seconds)
    return {name: {key: typical(values) for key, values in by.items()} for name, by in taken.items()}


def verify_seconds(target: Target, rows: int, context: int) -> float:
    """How long the second of two verifies takes, as a forward comes behind a forward when text is made."""
    seconds = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        target.verify([40 + row for row in range(rows)])
        seconds = time.perf_counter() - begin
        target.rollback(context)
    return seconds


def draft_seconds(target: Target, drafter: Drafter, draft_length: int, context: int) -> float:
    """How long a step of a draft takes that comes behind a verify."""
    target.verify([40])
    begin = time.perf_counter()
    drafted = len(drafter.draft(41, draft_length))
    seconds = (time.perf_counter() - begin) / max(1, drafted)
    target.rollback(context)
    return seconds


def texts(
    sessions: dict[str, Session], prompts: Sequence[str], lengths: Sequence[int], tokens: int, repeats: int, typical: Typical
) -> dict[str, dict[str, dict[str, float]]]:
    """Tokens per second of decoding with each draft length, geometric means over prompts of typical ones, and the share accepted."""
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
    """One row per side."""
    made = Table(title=title)
    made.add_column("side")
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    for column in columns:
        made.add_column(column, justify="right")
    for name, row in rows.items():
        made.add_row(name, *(row.get(column, "") for column in columns))
    return made


def opening_table(found: dict[str, dict[str, float]]) -> Table:
    """Seconds and megabytes."""
    rows = {
        name: {"seconds": f"{by['seconds']:.2f}"}
        | {key.removesuffix("_bytes") + " MB": f"{by[key] / 1e6:.0f}" for key in by if key != "seconds"}
        for name, by in found.items()
    }
    return table("opening", rows)


def forward_table(context: int, found: dict[str, dict[str, float]]) -> Table:
    """Milliseconds, and how many times as quick as the first side."""
    first = next(iter(found.values()))
    rows = {
        name: {key: f"{value:.2f} ({first[key] / value:.2f})" if key in first else f"{value:.2f}" for key, value in by.items()}
        for name, by in found.items()
    }
    return table(f"milliseconds behind {context} tokens (how many times as quick as the first)", rows)


def growth_table(by_context: dict[str, dict[str, dict[str, float]]]) -> Table:
    """How many times as long a forward takes behind the longest context as behind the shortest."""
    first, last = min(by_context, key=int), max(by_context, key=int)
    rows = {
        name: {key: f"{value / by_context[first][name][key]:.2f}" for key, value in by.items()} for name, by in by_context[last].items()
    }
    return table(f"times the milliseconds behind {first} tokens, behind {last}", rows)


def text_table(found: dict[str, dict[str, dict[str, float]]]) -> Table:
    """Tokens per second, times the first side's, and the share of drafts accepted."""
    first = next(iter(found.values()))
    rows = {
        name: {
            length: f"{of['tokens_per_second']:.1f} ({of['tokens_per_second'] / first[length]['tokens_per_second']:.2f}) {of['accepted']:.0%}"
            for length, of in by.items()
        }
        for name, by in found.items()
    }
    return table("tokens per second by draft length (times the first), drafts accepted", rows)


@click.command(context_settings={"show_default": True})
@click.argument("words", metavar="BACKEND:BUNDLE...", nargs=-1, required=True)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: all this process may use]")
@click.option("--context", "contexts", type=click.IntRange(min=1), multiple=True, default=(512, 4096), help="Texts before a forward.")
@click.option("--rows", default="1,2,3,4,5", help="Rows of the forwards.")
@click.option("--draft-length", "lengths", type=click.IntRange(0, 12), multiple=True, default=(0, 1, 2, 3, 4), help="0 is plain decoding.")
@click.option("--prompts", type=click.Path(path_type=Path, exists=True, dir_okay=False), multiple=True, help="JSON lists of texts.")
@click.option("--count", type=click.IntRange(min=1), default=1, help="Prompts of each list.")
@click.option("--tokens", type=click.IntRange(min=2), default=128)
@click.option("--repeats", type=click.IntRange(min=1), default=5)
@click.option("--openings", "opening_repeats", type=click.IntRange(min=0), default=0, help="How often each side is opened anew.")
@click.option("--statistic", type=click.Choice(("median", "best")), default="median", help="best: for a machine that is not quiet.")
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
    """Compare bundles on backends; the first is what others are held against."""
    sides = sides_of(words, threads or default_threads(), max(contexts) + ROOM)
    row_counts = [int(part) for part in rows.split(",")]
    listed = [prompt for path in prompts for prompt in json.loads(path.read_text("utf-8"))[:count]]
    typical: Typical = statistics.median if statistic == "median" else min
    record: dict[str, Any] = {
        "statistic": statistic,
        "sides": [asdict(side) for side in sides],
        "forwards": {},
        "texts": {},
        "openings": {},
    }

    def keep(made: Table) -> None:
        """Shows a part and writes what there is so far: a later part may be cut off."""
        Console(width=160).print(made)
        if json_path is not None:
            json_path.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")

    if opening_repeats:
        record["openings"] = openings(sides, opening_repeats)
        keep(opening_table(record["openings"]))
    with ExitStack() as stack:
        sessions = {side.name: stack.enter_context(side.open(say=True)) for side in sides}
        for context in sorted(contexts):
            found = record["forwards"][str(context)] = forwards(sessions, context, row_counts, max([3, *lengths]), repeats, typical)
            keep(forward_table(context, found))
        if len(contexts) > 1:
            keep(growth_table(record["forwards"]))
        if listed:
            record["texts"] = texts(sessions, listed, lengths, tokens, repeats, typical)
            keep(text_table(record["texts"]))


if __name__ == "__main__":
    main()
