"""`edge-run demo`: streams several kinds of text with accepted drafts in colour, compares with plain decoding, ends with a sentence."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from edge_devices.command_line import PanelCommand, takes
from edge_devices.energy.live import EnergyWatch
from edge_devices.waiting import Waiting, silent_wait, terminal_wait
from edge_runtime.cli.compare import Conditions, PairedRuns, RunOptions, RunsInTurn
from edge_runtime.cli.options import BundlePath, Opening, note, opens_bundle, wrapped
from edge_runtime.cli.prompts import printable
from edge_runtime.cli.terminal import EXAMPLE_THAT_ANSWERS
from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.session.generation import Generation
from edge_runtime.session.session import Session
from edge_runtime.text.channels import ChannelParser, Event, Text
from edge_runtime.text.chat_template import answering_template, is_instruction_tuned

# Texts that a model without instruction tuning continues.
TEXTS = {
    "code": """class Stack:
    \"\"\"A last-in, first-out stack.\"\"\"

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
""",
    "prose": "If the file does not exist, it is created.  If the file exists, ",
    "list": """Changes in this release:

* The parser accepts bytes as well as strings.
* The module has a new function to open a file.
*""",
    "JSON": """CODECS = [
    {"name": "utf-8", "aliases": ["utf8", "U8"], "errors": "strict"},
    {"name": "latin-1", "aliases": ["iso8859-1", "L1"], "errors": "strict"},
    {"name":""",
    "tests": """class StackTest(unittest.TestCase):

    def test_push(self):
        stack = Stack()
        stack.push(1)
        self.assertEqual(stack.items, [1])

    def test_pop(self):
""",
}
# Messages that an instruction-tuned model answers.
MESSAGES = {
    "code": "Write a Python class for a stack with push, pop and peek.",
    "prose": "Tell the story of a lighthouse keeper in one paragraph.",
    "list": "List ten things to check before a long bicycle ride.",
    "JSON": "Describe three planets as a JSON array with name, radius in km and number of moons.",
    "edit": 'Correct the spelling, change nothing else: "Their are to many peple who beleive that speling dosnt matter."',
}
# At lower temperatures, a small model soon repeats itself, which is too easy to draft. The seed makes texts comparable.
SAMPLING = SamplingParams(temperature=0.5, top_p=0.95, repetition_penalty=1.1, seed=7)
TOKENS = 72


@dataclass(frozen=True, kw_only=True)
class KindResult(PairedRuns):
    """The runs of one kind of text."""

    name: str


@dataclass(frozen=True, kw_only=True)
class DemoResult(Conditions):
    """The results of all kinds of text."""

    kinds: tuple[KindResult, ...]

    @property
    def speed_up(self) -> float:
        """Geometric mean over the kinds."""
        return statistics.geometric_mean(kind.speed_up for kind in self.kinds)

    def sentence(self) -> str:
        """Returns the result in one sentence: how many times as fast, and whether the output was the same."""
        ratios = sorted(kind.speed_up for kind in self.kinds)
        same = sum(kind.same_tokens for kind in self.kinds)
        equal = "the same output" if same == len(self.kinds) else f"the same output for {same} of {len(self.kinds)} kinds of text"
        return f"{self.speed_up:.2f} times as fast as without drafts ({ratios[0]:.2f} to {ratios[-1]:.2f} by kind of text), {equal}"

    def energy_sentence(self) -> str:
        """Returns a sentence about joules per token with drafts and without; an empty string if that is not known."""
        plain, drafted = self.plain_energy, self.drafted_energy
        if not self.energy_is_comparable or plain.joules_per_token is None or drafted.joules_per_token is None:
            return ""
        ratio = f"{drafted.joules_per_token.value / plain.joules_per_token.value:.2f} times the joules per token"
        if drafted.kind == "estimate" and drafted.facts:
            ours, theirs = (energy.figure().partition(" (")[0] for energy in (drafted, plain))
            return f"{ratio}, an ESTIMATE: {ours} J instead of {theirs}, nothing was measured ({drafted.facts.source})"
        return f"{ratio}, measured: {drafted.figure()} J instead of {plain.figure()}"

    def to_json(self) -> dict[str, Any]:
        """Returns plain values under stable keys."""
        return {
            "speed_up": self.speed_up,
            "same_tokens": all(kind.same_tokens for kind in self.kinds),
            "kinds": [{"name": kind.name, **kind.runs_json()} for kind in self.kinds],
            **self.conditions_json(),
            "sentence": self.sentence(),
            "energy_sentence": self.energy_sentence(),
        }


class Demo:
    """Runs the kinds of text that suit the bundle. `write` gets coloured text; `watch` returns the energy measurement of one run."""

    def __init__(
        self,
        session: Session,
        *,
        max_tokens: int,
        repeats: int,
        write: Callable[[str], None],
        watch: Callable[[], EnergyWatch],
        waiting: Waiting = silent_wait,
    ) -> None:
        self._session, self._max_tokens, self._repeats = session, max_tokens, repeats
        self._write, self._watch, self._waiting = write, watch, waiting
        self._template = answering_template(session.bundle, session.vocabulary)

    def run(self) -> DemoResult:
        """Streams each kind of text once with drafts, then measures it without and with drafts in turn."""
        runs = RunsInTurn(self._watch, self._write)
        manifest = self._session.bundle.manifest
        what = f": {printable(manifest.description)}" if manifest.description else ""
        self._write(wrapped(f"{manifest.architecture.parameters / 1e6:.0f} million weights{what}.", sys.stdout) + "\n")
        self._write(f"{click.style('Green', fg='green')}: drafts that were accepted.\n")
        kinds = tuple(self._kind(runs, name, prompt) for name, prompt in (TEXTS if self._template is None else MESSAGES).items())
        return DemoResult(kinds=kinds, **vars(runs.conditions()))

    def _kind(self, runs: RunsInTurn, name: str, prompt: str) -> KindResult:
        sent: str | list[int] = prompt if self._template is None else self._template.encode([{"role": "user", "content": prompt}])
        self._write(click.style(f"\n--- {name} ---\n", bold=True) + click.style(prompt, dim=True) + "\n" * (self._template is not None))
        for piece in self._coloured(self._generation(sent, drafting=True)):
            self._write(piece)
        self._write("\n")
        with self._waiting("again, without and with drafts") as report:
            for done in range(2 * self._repeats):
                report(done / (2 * self._repeats))
                runs.run(self._generation(sent, drafting=done % 2 == 1), drafting=done % 2 == 1)
        result = KindResult(name=name, **vars(runs.paired()))
        self._write(f"{wrapped(_line(result), sys.stdout)}\n")
        return result

    def _generation(self, sent: str | list[int], *, drafting: bool) -> Generation:
        length = None if drafting else 0
        return self._session.generate(sent, max_tokens=self._max_tokens, draft_length=length, sampling=SAMPLING)

    def _coloured(self, generation: Generation) -> Iterator[str]:
        """Yields the answer's text, with accepted drafts in colour."""
        parser = ChannelParser(self._session.vocabulary, self._template.stop if self._template else (), prompt=generation.prompt)
        for round_done in generation.rounds():
            for number, token in enumerate(round_done.tokens):
                text = _text(parser.feed(token))
                yield click.style(text, fg="green") if text and number < round_done.accepted else text
        yield _text(parser.finish())


def _text(events: list[Event]) -> str:
    return printable("".join(event.text for event in events if isinstance(event, Text)))


def _line(kind: KindResult) -> str:
    plain, drafted = (statistics.median(stats.tokens_per_second for stats in runs) for runs in (kind.plain, kind.drafted))
    length = kind.drafted[0].mean_acceptance_length
    equal = "the same output" if kind.same_tokens else "ANOTHER output"
    return f"{kind.speed_up:.2f} times as fast: {drafted:.1f} instead of {plain:.1f} tok/s, {length:.1f} tokens per step, {equal}"


@click.command(cls=PanelCommand)
@click.argument("bundle", type=BundlePath())
@takes("runs", RunOptions(max_tokens=TOKENS))
@opens_bundle(tuning=(), energy=("meter",))
def demo(bundle: Path, runs: RunOptions, opening: Opening) -> None:
    """Stream several kinds of text with accepted drafts in colour, beside plain decoding."""

    def write(text: str) -> None:
        if not runs.as_json:
            click.echo(text, nl=False)

    following = f"edge-run chat {shlex.quote(str(bundle))}"
    with opening.session(bundle, warn=False, measure=True) as session:
        if session.bundle.manifest.description and not is_instruction_tuned(session.bundle, session.vocabulary):
            following = f"{EXAMPLE_THAT_ANSWERS}, and edge-run chat small-chat"
        watch = opening.energy.or_estimate().watch
        result = Demo(session, max_tokens=runs.max_tokens, repeats=runs.repeats, write=write, watch=watch, waiting=terminal_wait).run()
    if runs.as_json:
        click.echo(json.dumps(result.to_json(), ensure_ascii=False))
        return
    if result.load.is_busy:
        note(f"meanwhile, {result.load.sentence()}")
    click.echo("\n" + click.style(wrapped(f"{result.sentence()}.", sys.stdout), bold=True))
    if joules := result.energy_sentence():
        click.echo(wrapped(f"{joules}.", sys.stdout))
    click.echo(f"Next: {following}")  # not wrapped, so that the command can be copied
