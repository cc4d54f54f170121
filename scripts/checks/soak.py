"""Runs many random requests through one session and checks its memory, descriptors, child processes, KV cache and output.

    python scripts/checks/soak.py BUNDLE --backend llama --tokens 1000000 --output soak.jsonl --plot soak.svg

Requests have random prompts, draft lengths, policies and sampling. A sixth has a constraint, and a sixth an image where the bundle takes
them. Some are cancelled, some reach the end of the context, some prompts are too long, some round callbacks raise. After every round the
cache must hold exactly the committed tokens, and a finished constrained text must be valid. Whenever the token count passes a multiple of
--check-every, the current greedy request is repeated with plain decoding. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import click
import numpy as np

from edge_runtime.bundle.bundle import Bundle
from edge_runtime.decoding.loop import Round
from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.errors import EdgeRuntimeError, RequestError
from edge_runtime.media.image import SIDE, Image
from edge_runtime.media.soft_rows import MediaPrompt
from edge_runtime.session.generation import GREEDY_PARAMS, Generation
from edge_runtime.session.open import open_session
from edge_runtime.session.self_checks import check_lossless
from edge_runtime.session.session import Session
from edge_runtime.text.constraints import ConstraintSource, Gbnf, JsonSchema, Regex

# Share of the run that is not counted: allocators and caches reach their final size, and the first use of a token faults pages in.
WARM_UP = 0.25
MAX_GROWTH = 0.01
SAMPLES = 400
# Kernels for one row and for several differ in the last bits; where plain decoding's two best logits are this close, either may win.
TIE = 1e-2
# int8 activations may round the same row otherwise in another batch: two logits that far apart changed places in one run.
TIE_OF_ROUNDED = 0.1
ROUNDED = ("int4", "int8")
# Constraints, and what a finished text must pass.
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}
CONSTRAINTS: tuple[tuple[ConstraintSource, Callable[[str], object]], ...] = (
    (JsonSchema(_SCHEMA), lambda text: {"name", "n"} <= json.loads(text).keys()),
    (Regex("(yes|no)( [a-z]{1,8}){2,40}"), re.compile("(yes|no)( [a-z]{1,8}){2,40}").fullmatch),
    (Gbnf('root ::= "x" ("+" "x"){1,60} ";"'), re.compile(r"x(\+x){1,60};").fullmatch),
)


class CallbackError(Exception):
    """Raised by our round callback in the middle of a request."""


class SoakError(Exception):
    """A check failed."""


@dataclass
class Soak:
    """A run: its counts so far, and the random generator that chooses the next request."""

    session: Session
    seed: int
    check_every: int
    tie: float
    chance: random.Random = field(init=False)
    texts: tuple[str, ...] = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)
    largest_tie: float = 0.0
    valid: Callable[[str], object] | None = None

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.texts = tuple(path.read_text(encoding="utf-8") for path in sorted(Path(os.__file__).parent.glob("*.py"))[:40])

    def prompt(self) -> list[int] | str | MediaPrompt:
        """Returns text from Python's standard library, random ids, or text with an image; a few are longer than the context."""
        if self.session.bundle.manifest.media is not None and self.chance.random() < 1 / 6:
            shape = (4 * SIDE, self.chance.randint(1, 5) * SIDE, 3)
            pixels = np.random.default_rng(self.chance.randrange(64)).integers(0, 256, shape, np.uint8)
            self.counts["images"] += 1
            return self.session.media_prompt("What is this?", [Image(pixels)])
        vocabulary, context = self.session.bundle.manifest.architecture.vocab_size, self.session.target.context
        if self.chance.random() < 0.03:
            return [self.chance.randrange(vocabulary) for _ in range(self.chance.randint(context - 20, context + 5))]
        if self.chance.random() < 0.3:
            return [self.chance.randrange(vocabulary) for _ in range(self.chance.randint(1, context // 3))]
        text = self.chance.choice(self.texts)
        start = self.chance.randrange(max(1, len(text) - 200))
        return text[start : start + self.chance.randint(4, context // 2)]

    def request(self) -> Generation:
        """Returns the next request. Raises RequestError if the prompt does not fit."""
        chance = self.chance
        sampled = chance.random() < 0.2
        fixed = chance.random() < 0.8
        constraint, self.valid = chance.choice(CONSTRAINTS) if chance.random() < 1 / 6 else (None, None)
        return self.session.generate(
            self.prompt(),
            max_tokens=chance.choice((1, 8, 64, 200, 400)),
            draft_length=chance.randint(0, self.session.settings.longest_draft) if fixed else None,
            sampling=SamplingParams(temperature=0.9, top_p=0.95, seed=chance.randrange(1 << 30)) if sampled else GREEDY_PARAMS,
            acceptance=chance.choice(("block", "coupled")),
            reuse_prefix=chance.random() < 0.3,
            stop=("return",) if constraint is None and chance.random() < 0.1 else (),
            constraint=constraint,
            on_round=self._failing if chance.random() < 0.02 else None,
        )

    def run(self, limit: int) -> Iterator[int]:
        """Runs requests until `limit` tokens have been emitted; yields the token count after each."""
        while self.counts["tokens"] < limit:
            before = self.counts["tokens"]
            try:
                generation = self.request()
            except RequestError:
                self.counts["refused"] += 1
                continue
            self._follow(generation)
            self.counts["requests"] += 1
            self.counts["tokens"] += len(generation.tokens)
            if before // self.check_every != self.counts["tokens"] // self.check_every:
                self._compare(generation)
            yield self.counts["tokens"]

    def _failing(self, _: Round) -> None:
        if self.chance.random() < 0.3:
            raise CallbackError

    def _follow(self, generation: Generation) -> None:
        """Runs a request to its end, or cancels it."""
        cancel_at = self.chance.randint(1, 60) if self.chance.random() < 0.25 else None
        try:
            for rounds, _ in enumerate(generation.rounds(), 1):
                self._check_length(generation)
                if rounds == cancel_at:
                    self.counts["cancelled"] += 1
                    break
            else:
                self.counts[f"ended: {generation.finish_reason}"] += 1
                self._check_text(generation)
            self._check_tokens(generation)
        except CallbackError:
            self.counts["callback failed"] += 1

    def _check_length(self, generation: Generation) -> None:
        rows, committed = self.session.target.length, len(generation.prompt) + len(generation.tokens) - 1
        if rows != committed:
            raise SoakError(f"the cache holds {rows} rows, {committed} tokens are committed")

    def _check_tokens(self, generation: Generation) -> None:
        if self.session.target.tokens.tolist() != [*generation.prompt, *generation.tokens][:-1]:
            raise SoakError("the cache holds rows of other tokens than the committed ones")

    def _check_text(self, generation: Generation) -> None:
        """A constrained text that was not cut short is valid."""
        if self.valid is None:
            return
        self.counts["constrained"] += 1
        if generation.complete:
            self.counts["constrained and complete"] += 1
            text = generation.text()
            if not self.valid(text):
                raise SoakError(f"a constrained text is not valid: {text[:200]!r}")

    def _compare(self, generation: Generation) -> None:
        if generation.options.sampling != GREEDY_PARAMS or not generation.tokens:
            self.counts["not comparable"] += 1  # a sampled request cannot be repeated plainly
            return
        report = check_lossless(self.session, generation)
        self.counts["compared"] += 1
        if report.equal:
            return
        gap = abs(report.logit_gap or 0.0)
        self.largest_tie = max(self.largest_tie, gap)
        self.counts["near ties"] += 1
        if report.logit_gap is None or gap > self.tie:
            raise SoakError(f"a continuation differs from plain decoding: {report.sentence()}")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """State of this process after `tokens` tokens; memory in bytes. `resident` is `anonymous` plus pages of mapped files."""

    tokens: int
    resident: int
    anonymous: int
    descriptors: int
    children: int


def tie_of(bundle: Bundle, backend: str) -> float:
    """Returns the largest gap of two logits that counts as a tie. With float weights, onnxruntime does not round activations."""
    rounded = backend == "onnx" and (bundle.file("target", "onnx").quantization or "").startswith(ROUNDED)
    return TIE_OF_ROUNDED if rounded else TIE


def sample(tokens: int) -> Sample:
    """Returns the state of this process. Linux only."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident, anonymous = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon"))
    children = sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    return Sample(tokens=tokens, resident=resident, anonymous=anonymous, descriptors=descriptors, children=children)


def growth(samples: list[Sample], size: Callable[[Sample], int]) -> float:
    """Returns the relative growth of a size between the first and the last tenth of the samples after the warm-up."""
    after = [size(sample) for sample in samples if sample.tokens >= WARM_UP * samples[-1].tokens]
    tenth = max(1, len(after) // 10)
    return statistics.median(after[-tenth:]) / statistics.median(after[:tenth]) - 1


def draw(samples: list[Sample], title: str, path: Path) -> None:
    """Writes a plot of resident and anonymous memory over tokens."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
    thousands = [sample.tokens / 1000 for sample in samples]
    axes.plot(thousands, [sample.resident / 1e6 for sample in samples], color="#0072b2", linewidth=1.4, label="with pages of mapped files")
    axes.plot(thousands, [sample.anonymous / 1e6 for sample in samples], color="#d55e00", linewidth=1.4, label="the process's own")
    axes.axvline(WARM_UP * samples[-1].tokens / 1000, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="thousand tokens (dotted: end of the warm-up)", ylabel="resident MB", title=title, ylim=(0, None))
    axes.legend(loc="lower right")
    figure.savefig(path, metadata={"Date": None})


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--backend", type=click.Choice(("llama", "onnx")), required=True)
@click.option("--tokens", type=click.IntRange(min=100), default=1_000_000, help="Tokens to emit.")
@click.option("--context", type=click.IntRange(min=64), default=512)
@click.option("--threads", type=click.IntRange(min=1), default=1)
@click.option("--check-every", type=click.IntRange(min=1), default=1000, help="Tokens between comparisons with plain decoding.")
@click.option("--seed", default=1)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), default=Path("soak.jsonl"), help="One JSON line per sample.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="SVG or PNG of resident memory; needs [report].")
def main(
    bundle: Path,
    backend: Any,
    tokens: int,
    context: int,
    threads: int,
    check_every: int,
    seed: int,
    output: Path,
    plot: Path | None,
) -> None:
    """Run random requests through BUNDLE until TOKENS tokens have been emitted; check memory, cache and output."""
    samples: list[Sample] = []
    begin = time.monotonic()
    try:
        with (
            output.open("w", encoding="utf-8") as log,
            open_session(
                bundle,
                backend=backend,
                context=context,
                threads=threads,
                notify=lambda text: click.echo(text, err=True),
            ) as session,
        ):
            soak = Soak(session, seed, check_every, tie_of(session.bundle, backend))
            for done in soak.run(tokens):
                if not samples or done - samples[-1].tokens >= tokens / SAMPLES:
                    samples.append(sample(done))
                    seconds = round(time.monotonic() - begin, 3)
                    log.write(json.dumps({**asdict(samples[-1]), "seconds": seconds, **soak.counts}) + "\n")
                    log.flush()
    except (EdgeRuntimeError, SoakError) as error:
        raise click.ClickException(f"{error} (after {samples[-1].tokens if samples else 0} tokens, seed {seed})") from error
    grown = {name: growth(samples, attrgetter(name)) for name in ("resident", "anonymous")}
    summary = {
        "backend": backend,
        **asdict(samples[-1]),
        **soak.counts,
        "largest_tie": soak.largest_tie,
        "seconds": round(time.monotonic() - begin, 1),
    }
    click.echo(json.dumps({**summary, "growth_after_warm_up": {name: round(share, 5) for name, share in grown.items()}}))
    if plot is not None:
        draw(samples, f"{soak.counts['tokens']:,} tokens on {backend}: {grown['resident']:+.2%} after the warm-up", plot)
    for name in ("descriptors", "children"):
        if getattr(samples[-1], name) > max(getattr(sample, name) for sample in samples if sample.tokens <= WARM_UP * samples[-1].tokens):
            raise click.ClickException(f"more {name} than in the warm-up: {getattr(samples[-1], name)}")
    for name, share in grown.items():
        if share >= MAX_GROWTH:
            raise click.ClickException(f"{name} memory grew by {share:.2%} after the warm-up, at most {MAX_GROWTH:.0%} is allowed")


if __name__ == "__main__":
    main()
