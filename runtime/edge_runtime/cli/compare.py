"""`edge-run compare`: one prompt with and without drafts, run in turn."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_devices.command_line import PanelCommand, takes
from edge_devices.energy.live import EnergyPool, EnergyWatch, RunEnergy
from edge_devices.machine.load import LoadWatch, MachineLoad, load_now
from edge_devices.machine.memory import peak_memory_bytes
from edge_devices.option_fields import option
from edge_devices.waiting import Waiting, silent_wait, terminal_wait
from edge_runtime.cli.energy_options import unwatched
from edge_runtime.cli.messages import MessageOptions, printable, read_prompt, sent_prompt
from edge_runtime.cli.options import BundlePath, Opening, note, opens_bundle
from edge_runtime.media.soft_rows import MediaPrompt
from edge_runtime.session.row_equality import RowEquality
from edge_runtime.session.session import Session
from edge_runtime.session.stats import DecodeStats

if TYPE_CHECKING:
    from rich.table import Table

NOTHING_DRAFTED = "nothing was drafted, so this says nothing about drafts (give --draft-length 3, or a longer --max-tokens)"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How often and how long to run."""

    max_tokens: int = option("-n", default=128, low=1, panel="Output", help="Maximum number of tokens of each run.")
    repeats: int = option(default=3, low=1, panel="Output", help="Runs with and without drafts; the table shows medians.")
    as_json: bool = option("--json", default=False, panel="Output", help="Print one JSON object instead of text.")


@click.command(cls=PanelCommand)
@click.argument("bundle", type=BundlePath())
@click.argument("prompt")
@takes("runs", RunOptions)
@takes("message", MessageOptions)
@opens_bundle()
def compare(bundle: Path, prompt: str, runs: RunOptions, message: MessageOptions, opening: Opening) -> None:
    """Run PROMPT with and without drafts in turn and print a table."""
    text = read_prompt(prompt)
    with opening.session(bundle, warn=False) as session:
        comparison = compare_runs(
            session,
            sent_prompt(session, text, message).sent,
            max_tokens=runs.max_tokens,
            draft_length=opening.draft_length,
            repeats=runs.repeats,
            show=(lambda _: None) if runs.as_json else (lambda piece: click.echo(printable(piece), nl=False, err=True)),
            shown_prompt=text,
            watch=opening.energy.or_estimate().watch,
            waiting=terminal_wait,
        )
    if runs.as_json:
        click.echo(json.dumps(comparison.to_json(), ensure_ascii=False))
        return
    from rich.console import Console

    Console().print(comparison_table(comparison))
    for sentence in comparison.remarks():
        note(sentence)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Statistics of the runs of each kind; run i of the one kind followed run i of the other.

    `drafting` describes the draft lengths; `draft_length` is None if a policy chose them. `same_tokens`: all runs had the same output.
    The energy of a kind is that of all its runs together. `load_before` is the load right before the first run, `load` that meanwhile.
    """

    drafting: str
    draft_length: int | None
    plain: tuple[DecodeStats, ...]
    drafted: tuple[DecodeStats, ...]
    same_tokens: bool
    rows: RowEquality
    peak_memory: int
    load_before: MachineLoad
    load: MachineLoad
    plain_energy: RunEnergy
    drafted_energy: RunEnergy

    @property
    def speed_up(self) -> float:
        """Median of `ratios`."""
        return statistics.median(self.ratios)

    @property
    def ratios(self) -> list[float]:
        """Tokens per second with drafts / without, per pair of neighbouring runs: a machine's speed drifts."""
        return [drafted.tokens_per_second / plain.tokens_per_second for drafted, plain in zip(self.drafted, self.plain, strict=True)]

    @property
    def drafted_tokens(self) -> int:
        """How many tokens all runs drafted; with 0, both sides did the same and the ratios are noise."""
        return sum(stats.drafted for stats in self.drafted)

    def remarks(self) -> list[str]:
        """Returns what the figures mean: whether drafts can change text, and why they may mean little: nothing was drafted, joules are
        estimated or missing, or the machine was busy."""
        sentences = [*([] if self.drafted_tokens else [NOTHING_DRAFTED]), self.rows.sentence()]
        if self.drafted_energy.kind == "estimate" and self.drafted_energy.facts:
            sentences.append(f"energy: nothing was measured; {self.drafted_energy.facts.source}, with the range of these watts")
        sentences += [": ".join(energy.row()) for energy in (self.plain_energy, self.drafted_energy) if energy.kind == "none"][:1]
        return [*sentences, f"meanwhile, {self.load.sentence()}"] if self.load.is_busy else sentences

    def to_json(self) -> dict[str, Any]:
        """Returns plain values under stable keys; `speed_up` is None if nothing was drafted."""
        return {
            "drafted_tokens": self.drafted_tokens,
            "machine_load_before": self.load_before.to_json(),
            "machine_load": self.load.to_json(),
            "drafting": self.drafting,
            "draft_length": self.draft_length,
            "speed_up": self.speed_up if self.drafted_tokens else None,
            "same_tokens": self.same_tokens,
            "rows": self.rows.to_json(),
            "peak_memory_bytes": self.peak_memory,
            "plain": [s.to_json() for s in self.plain],
            "drafted": [s.to_json() for s in self.drafted],
            "energy": {"plain": self.plain_energy.to_json(), "drafted": self.drafted_energy.to_json()},
        }


def compare_runs(
    session: Session,
    prompt: str | list[int] | MediaPrompt,
    *,
    max_tokens: int,
    draft_length: int | None,
    repeats: int,
    show: Callable[[str], None],
    shown_prompt: str,
    watch: Callable[[], EnergyWatch] = unwatched,
    waiting: Waiting = silent_wait,
) -> Comparison:
    """Runs without and with drafts alternately, `repeats` times each; `show` gets the text of the first run of each kind.

    `draft_length` None leaves it to the session's settings; `watch` returns the energy measurement of one run. Before the first run it is
    said if the machine is busy.
    """
    drafting = f"policy {session.settings.policy}" if draft_length is None else f"drafts of {draft_length}"
    runs: dict[int, list[DecodeStats]] = {0: [], 1: []}
    outputs: list[list[int]] = []
    pools = EnergyPool(), EnergyPool()

    def run(drafting_on: int, shown: Callable[[str], None]) -> None:
        shown(f"\n--- {drafting if drafting_on else 'plain'} ---\n{shown_prompt}")
        generation = session.generate(prompt, max_tokens=max_tokens, draft_length=draft_length if drafting_on else 0)
        with watch() as energy:
            for piece in generation:
                shown(piece)
        energy.add_to(pools[drafting_on], generation.stats.tokens)
        runs[drafting_on].append(generation.stats)
        outputs.append(generation.tokens)

    # Both are measured on first use, before anything is shown.
    rows = session.row_equality(waiting=waiting)
    if draft_length is None:
        session.profit()
    before = load_now()
    if before.is_busy:
        show(f"before the first run, {before.sentence()}\n")
    load = LoadWatch()
    for drafting_on in (0, 1):
        run(drafting_on, show)
    show("\n\n")
    with waiting(f"the same again, {repeats - 1} times without and with drafts in turn") as report:
        for done in range(2, 2 * repeats):
            report((done - 2) / (2 * repeats - 2))
            run(done % 2, lambda _: None)
    return Comparison(
        drafting=drafting,
        draft_length=draft_length,
        plain=tuple(runs[0]),
        drafted=tuple(runs[1]),
        same_tokens=all(o == outputs[0] for o in outputs),
        rows=rows,
        peak_memory=peak_memory_bytes(),
        load_before=before,
        load=load.load(),
        plain_energy=pools[0].energy(),
        drafted_energy=pools[1].energy(),
    )


def _energy_row(comparison: Comparison) -> tuple[str, str, str]:
    energies = (comparison.plain_energy, comparison.drafted_energy)
    if any(energy.joules_per_token is None for energy in energies):
        return "energy, J/token", "not measured", "not measured"
    plain, drafted = (energy.figure() for energy in energies)
    if energies[0].kind == "estimate":
        return "J/token, an ESTIMATE", plain.partition(" (")[0], drafted.partition(" (")[0]
    scope = f", scope {energies[0].facts.scope}" if energies[0].facts else ""
    return f"energy, J/token{scope}", plain, drafted


def comparison_table(comparison: Comparison) -> Table:
    """Returns a table of medians: one column without drafts, one with."""
    from rich.table import Table

    def median(runs: tuple[DecodeStats, ...], figure: Callable[[DecodeStats], float]) -> float:
        return statistics.median(figure(s) for s in runs)

    table = Table(title=f"medians of {len(comparison.plain)} runs each, in turn")
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column(comparison.drafting, justify="right")
    plain, drafted = comparison.plain, comparison.drafted
    table.add_row("tok/s", *(f"{median(r, lambda s: s.tokens_per_second):.1f}" for r in (plain, drafted)))
    ratios = comparison.ratios
    ratio = f"{comparison.speed_up:.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if comparison.drafted_tokens else "nothing drafted"
    table.add_row("speed-up over plain", "1.00", ratio)
    for position, share in enumerate(drafted[0].acceptance_by_position, start=1):
        table.add_row(f"accepted at draft {position}", "-", f"{share:.1%}")
    if (rate := drafted[0].acceptance_rate) is not None:
        table.add_row("acceptance rate", "-", f"{rate:.1%}")
    table.add_row("mean acceptance length", *(f"{median(r, lambda s: s.mean_acceptance_length):.2f}" for r in (plain, drafted)))
    table.add_row("time to first token, ms", *(f"{median(r, lambda s: 1000 * s.first_token_seconds):.1f}" for r in (plain, drafted)))
    table.add_row("tokens", str(plain[0].tokens), str(drafted[0].tokens))
    table.add_row(*_energy_row(comparison))
    table.add_row("same output", "", "yes" if comparison.same_tokens else "no (see --verify-lossless)")
    table.add_row("peak memory of the process, MB", "", f"{comparison.peak_memory / 1e6:.0f}")
    return table
