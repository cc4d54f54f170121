"""Times the first answers on a machine that has measured nothing yet: the default policy beside every fixed draft length, in turn.

    python scripts/benchmarks/bench_first_answers.py build/first-answers
    python scripts/benchmarks/bench_first_answers.py build/first-answers --bundle e2b-shapes --passes 1

Each pass opens a pair with an empty cache folder and asks for answers of a few tokens; each answer is written once by every side, in random
order. Before the answers that count, short ones run every number of rows that a verify may have, by fixed lengths, which teach the default
nothing; so no side pays for what an engine does but once. Before the first pass, a session that is thrown away runs the default as well. A
fixed length that is far behind after some answers is left out of the rest. The goal is that the default takes at most 1/0.9 of the
time of the best fixed length, and that no answer has an acceptance length of 1.00 where a fixed length has 1.5 or more. Without BUNDLE the
shipped pairs are exported to FOLDER as ONNX graphs: the chat pair, the reference pair and its widened form, about five minutes in all.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from edge_bench.measure.request import DOMAINS, Prompt, prepare, shipped_prompts
from edge_devices.command_line import one_sentence_errors
from edge_devices.files.user_cache import CACHE_VARIABLE
from edge_devices.machine.load import LoadWatch
from edge_export.checkpoint.sources import CHAT_DESCRIPTION
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session

PAIRS = {"chat": ["--chat"], "reference": [], "widened": ["--widened"]}
DEFAULT = "default"
# After so many answers of a slow pair a fixed length is left out if it takes so many times as long as the best one, which takes so long.
SURE_AFTER, FAR_BEHIND, SLOW_SECONDS = 5, 1.5, 5.0
# Answers of the session that is thrown away.
WARM_ANSWERS = 2
GOAL, DRAFTED, MANY = 0.9, 1.0, 1.5
# What the chat pair was taught, in wordings of its own (scripts/pairs/refpair/answers.txt).
QUESTIONS = (
    "What is a queue?",
    "What is a stack?",
    "What is recursion?",
    "How do I read a file?",
    "What does len do?",
    "What is a list comprehension?",
    "How many seconds are in 5 minutes?",
    "What is KeyError?",
    "How do I sort a list?",
    "What is a generator?",
    "What is the difference between a list and a tuple?",
    "What is a decorator?",
    "Tell me about import json.",
    "What is a dictionary?",
    "How do I chat with a bundle?",
    "Who made you?",
    "What does zip do?",
    "What is the capital of France?",
    "How many grams are in 3 kilograms?",
    "What is a closure?",
)


@dataclass
class Pass:
    """What one pass of a pair gave: seconds of each side by answer, its acceptance lengths, and what the machine did meanwhile."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    lengths: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    load: str = ""

    @property
    def answers(self) -> int:
        return len(self.seconds[DEFAULT])

    def totals(self) -> dict[str, float]:
        """Returns the seconds of the sides that wrote all answers so far."""
        return {side: sum(each) for side, each in self.seconds.items() if len(each) == self.answers}

    def best(self) -> tuple[str, float]:
        """Returns the best fixed length and its seconds."""
        return min(((side, total) for side, total in self.totals().items() if side != DEFAULT), key=lambda item: item[1])

    def undrafted(self) -> int:
        """Returns how many answers have an acceptance length of 1 by default, and MANY or more with a fixed length."""
        return sum(
            length <= DRAFTED and max(each[n] for side, each in self.lengths.items() if side != DEFAULT and n < len(each)) >= MANY
            for n, length in enumerate(self.lengths[DEFAULT])
        )


def sides_of(lengths: Sequence[int], so_far: Pass) -> list[str]:
    """Returns the sides of the next answer: the default, and the fixed lengths that may still be the best."""
    fixed = [str(length) for length in lengths]
    if so_far.answers >= SURE_AFTER:
        totals, most = so_far.totals(), FAR_BEHIND * max(so_far.best()[1], SLOW_SECONDS)
        fixed = [side for side in fixed if totals.get(side, math.inf) <= most]
    return [DEFAULT, *fixed]


def warm_up(session: Session, prompt: Prompt) -> None:
    """Has a short answer written with every draft length, none of which the policy hears of."""
    for length in range(session.settings.longest_draft + 1):
        session.generate(prompt.ids, max_tokens=length + 2, draft_length=length).text()


def measure(session: Session, prompts: Sequence[Prompt], lengths: Sequence[int], tokens: int, dice: random.Random) -> Pass:
    """Has every answer written by each side."""
    result, watch = Pass(), LoadWatch()
    for prompt in prompts:
        sides = sides_of(lengths, result)
        for side in dice.sample(sides, len(sides)):
            generation = session.generate(prompt.ids, max_tokens=tokens, draft_length=None if side == DEFAULT else int(side))
            generation.text()
            result.seconds[side].append(generation.stats.decode_seconds)
            result.lengths[side].append(generation.stats.tokens / max(1, generation.stats.rounds))
    result.load = watch.load().words()
    return result


@contextlib.contextmanager
def fresh_cache() -> Iterator[None]:
    """Opens what follows with an empty cache folder."""
    before = os.environ.get(CACHE_VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE_VARIABLE] = folder
        try:
            yield
        finally:
            os.environ.pop(CACHE_VARIABLE)
            if before is not None:
                os.environ[CACHE_VARIABLE] = before


def one_pass(bundle: Path, backend: str | None, answers: int, lengths: Sequence[int], tokens: int, seed: int) -> Pass:
    """Opens the pair as on a machine that knows nothing, and measures it."""
    with fresh_cache(), open_session(bundle, backend=backend) as session:
        if session.bundle.manifest.description == CHAT_DESCRIPTION:
            chosen = [Prompt(domain="chat", number=n, text=text, is_turn=True) for n, text in enumerate(QUESTIONS)]
        else:
            chosen = shipped_prompts(DOMAINS, -(-answers // len(DOMAINS)))
        prompts = prepare(chosen[:answers], session)
        warm_up(session, prompts[0])
        return measure(session, prompts, lengths, tokens, random.Random(seed))


def exported(folder: Path) -> list[Path]:
    """Returns the bundles of the shipped pairs in a folder, exported where they are not there."""
    for name, options in PAIRS.items():
        if not (folder / name).exists():
            start = Path(sys.executable).with_name("edge-export")
            command = [str(start), "reference", *options, "--format", "onnx", "--no-verify", "-o", str(folder / name)]
            subprocess.run(command, check=True, capture_output=True)
    return [folder / name for name in PAIRS]


@click.command(context_settings={"show_default": True})
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--bundle", "bundles", type=click.Path(path_type=Path, exists=True, file_okay=False), multiple=True, help="Instead of those.")
@click.option("--backend", help="The backend of all pairs.")
@click.option("--answers", default=20)
@click.option("--tokens", default=30, help="Tokens of an answer at most.")
@click.option("--longest", default=7, help="The longest fixed draft.")
@click.option("--passes", default=3)
@click.option("--json", "as_json", type=click.Path(path_type=Path, dir_okay=False), help="Write every answer's seconds and lengths here.")
@one_sentence_errors()
def main(
    folder: Path, bundles: tuple[Path, ...], backend: str | None, answers: int, tokens: int, longest: int, passes: int, as_json: Path | None
) -> None:
    """Time the default beside fixed draft lengths on the pairs in FOLDER; end with 1 if a pair misses the goal."""
    folder.mkdir(parents=True, exist_ok=True)
    table = Table(
        "pair", "best fixed length", "its seconds", "default's", "share of its speed", "answers without drafts", "times plain", "load"
    )
    console, missed, records = Console(), False, {}
    for bundle in bundles or exported(folder):
        done, lengths = list[Pass](), list(range(longest + 1))
        one_pass(bundle, backend, min(answers, WARM_ANSWERS), lengths[:1], tokens, seed=0)
        for seed in track(range(passes), f"{bundle.name} ", console=Console(stderr=True)):
            done.append(one_pass(bundle, backend, answers, lengths, tokens, seed))
            lengths = [length for length in lengths if str(length) in done[-1].totals()]
        records[bundle.name] = [{"seconds": each.seconds, "lengths": each.lengths, "load": each.load} for each in done]
        if as_json is not None:
            as_json.write_text(json.dumps(records) + "\n", encoding="utf-8")
        totals = {side: sum(each.totals()[side] for each in done) for side in [DEFAULT, *map(str, lengths)]}
        default, undrafted = totals.pop(DEFAULT), sum(each.undrafted() for each in done)
        side = min(totals, key=totals.__getitem__)
        missed |= totals[side] / default < GOAL or undrafted > 0
        table.add_row(
            bundle.name,
            side,
            f"{totals[side]:.3f}",
            f"{default:.3f}",
            f"{totals[side] / default:.3f}",
            f"{undrafted} of {passes * answers}",
            f"{totals['0'] / default:.2f}" if "0" in totals else "-",
            done[-1].load,
        )
    console.print(table)
    raise SystemExit(missed)


if __name__ == "__main__":
    main()
