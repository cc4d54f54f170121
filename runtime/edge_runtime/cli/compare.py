"""`edge-run compare`: runs one prompt with and without drafts in turn."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_devices.command_line import PanelCommand, takes
from edge_devices.energy.live import EnergyPool, EnergyWatch, RunEnergy
from edge_devices.machine.memory import peak_memory_bytes
from edge_devices.machine.processors import LoadWatch, MachineLoad, load_now
from edge_devices.meters.base import Scope, scope_words
from edge_devices.option_fields import option
from edge_devices.waiting import Waiting, silent_wait, terminal_wait
from edge_runtime.backends.selection import CARDS
from edge_runtime.cli.options import BundlePath, Opening, note, opens_bundle, unwatched
from edge_runtime.cli.prompts import MessageOptions, printable, read_prompt, sent_prompt
from edge_runtime.cli.terminal import NOTHING_DRAFTED
from edge_runtime.media.soft_rows import MediaPrompt
from edge_runtime.session.generation import Generation
from edge_runtime.session.monitor import DecodeStats
from edge_runtime.session.row_equality import RowEquality
from edge_runtime.session.session import Session

if TYPE_CHECKING:
    from rich.table import Table


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
    """Run PROMPT with and without drafts in turn and print a table.

    --device may name several devices, such as cpu,gpu: one after the other, side by side in a table.
    """
    text, names = read_prompt(prompt), (opening.load.device or "cpu").split(",")
    comparisons: dict[str, Comparison] = {}
    for name in names:
        placed = opening if len(names) == 1 else replace(opening, load=replace(opening.load, device=name))
        with placed.session(bundle, warn=False, measure=True) as session:
            comparisons[f"{CARDS[session.backend].title} on {session.device}" if len(names) > 1 else name] = compare_runs(
                session,
                sent_prompt(session, text, message).sent,
                max_tokens=runs.max_tokens,
                draft_length=opening.draft_length,
                repeats=runs.repeats,
                show=(lambda _: None) if runs.as_json else (lambda piece: click.echo(printable(piece), nl=False, err=True)),
                shown_prompt=text,
                watch=opening.energy.or_estimate().watch,
                meter_named=opening.energy.named,
                waiting=terminal_wait,
            )
    first = next(iter(comparisons.values()))
    if runs.as_json:
        devices = {name: each.to_json() for name, each in comparisons.items()}
        click.echo(json.dumps(first.to_json() if len(names) == 1 else {"devices": devices}, ensure_ascii=False))
        return
    from rich.console import Console

    Console().print(comparison_table(first) if len(names) == 1 else devices_table(comparisons))
    for name, each in comparisons.items():
        for sentence in each.remarks():
            note(sentence if len(names) == 1 else f"{name}: {sentence}")


@dataclass(frozen=True, kw_only=True)
class PairedRuns:
    """Statistics of the runs of one prompt. Run i with drafts came right after run i without.

    `same_tokens` says that all runs had the same output. `output` has the first run's tokens.
    """

    plain: tuple[DecodeStats, ...]
    drafted: tuple[DecodeStats, ...]
    same_tokens: bool
    output: tuple[int, ...] = ()

    @property
    def ratios(self) -> list[float]:
        """Tokens per second with drafts / without, for each pair of adjacent runs, because a machine's speed drifts."""
        return [drafted.tokens_per_second / plain.tokens_per_second for drafted, plain in zip(self.drafted, self.plain, strict=True)]

    @property
    def speed_up(self) -> float:
        """Median of `ratios`."""
        return statistics.median(self.ratios)

    def runs_json(self) -> dict[str, Any]:
        """Returns plain values under stable keys."""
        plain, drafted = ([stats.to_json() for stats in runs] for runs in (self.plain, self.drafted))
        return {"speed_up": self.speed_up, "same_tokens": self.same_tokens, "plain": plain, "drafted": drafted}


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The energy of all runs without and with drafts, and the load from other programs before the first run and during all runs.

    `prompt_energy` covers the prompts of all runs, because prompts are the same work on both sides; its joules per token are per prompt
    token. `meter_named` says that the user named the meter, so that an estimate is shown however wide its range is.
    """

    plain_energy: RunEnergy
    drafted_energy: RunEnergy
    prompt_energy: RunEnergy
    load_before: MachineLoad
    load: MachineLoad
    meter_named: bool = False

    @property
    def energy_is_comparable(self) -> bool:
        """Whether to show the joules per token of both sides: measured ones, requested estimates, or estimates that do not overlap."""
        plain, drafted = self.plain_energy.joules_per_token, self.drafted_energy.joules_per_token
        if plain is None or drafted is None:
            return False
        is_shown = self.drafted_energy.kind != "estimate" or self.meter_named
        return is_shown or plain.high < drafted.low or drafted.high < plain.low

    def conditions_json(self) -> dict[str, Any]:
        """Returns plain values under stable keys."""
        energies = {"plain": self.plain_energy, "drafted": self.drafted_energy, "prompt": self.prompt_energy}
        energy = {name: each.to_json() for name, each in energies.items()}
        return {"energy": energy, "machine_load_before": self.load_before.to_json(), "machine_load": self.load.to_json()}


class RunsInTurn:
    """Runs requests without and with drafts, and keeps their figures. `watch` returns the energy measurement of one run.

    `show` gets a sentence if the machine is busy before the first run.
    """

    def __init__(self, watch: Callable[[], EnergyWatch], show: Callable[[str], None]) -> None:
        self._watch, self._pools, self._prompts = watch, (EnergyPool(), EnergyPool()), EnergyPool()
        self._before, self._load = load_now(), LoadWatch()
        self._stats: tuple[list[DecodeStats], list[DecodeStats]] = [], []
        self._outputs: list[list[int]] = []
        if self._before.is_busy:
            show(f"before the first run, {self._before.sentence()}\n")

    def run(self, generation: Generation, *, drafting: bool, show: Callable[[str], None] = lambda _: None) -> None:
        """Runs a request; `show` gets its text."""
        with self._watch() as energy:
            generation.prefill()
            energy.end_prompt()
            for piece in generation:
                show(piece)
        energy.add_to(self._pools[drafting], generation.stats.tokens)
        energy.add_prompt_to(self._prompts, generation.stats.prompt_tokens - 1)  # the first round computes the last one
        self._stats[drafting].append(generation.stats)
        self._outputs.append(generation.tokens)

    def paired(self) -> PairedRuns:
        """Returns the runs since the last call."""
        (plain, drafted), outputs = self._stats, self._outputs
        self._stats, self._outputs = ([], []), []
        same = all(tokens == outputs[0] for tokens in outputs)
        return PairedRuns(plain=tuple(plain), drafted=tuple(drafted), same_tokens=same, output=tuple(outputs[0]))

    def conditions(self) -> Conditions:
        """Returns the conditions of all runs so far."""
        plain, drafted, prompt = (pool.energy() for pool in (*self._pools, self._prompts))
        return Conditions(
            plain_energy=plain, drafted_energy=drafted, prompt_energy=prompt, load_before=self._before, load=self._load.load()
        )


@dataclass(frozen=True, kw_only=True)
class Comparison(PairedRuns, Conditions):
    """The comparison for one prompt. `drafting` describes the draft lengths; `draft_length` is None if a policy chose them."""

    drafting: str
    draft_length: int | None
    rows: RowEquality
    peak_memory: int

    @property
    def follows_from_medians(self) -> bool:
        """Whether the speed-up is within 5 % of the ratio of the median speeds, as a reader of the table expects."""
        plain, drafted = (statistics.median(stats.tokens_per_second for stats in runs) for runs in (self.plain, self.drafted))
        return abs(drafted / plain / self.speed_up - 1) <= 0.05

    @property
    def drafted_tokens(self) -> int:
        """How many tokens all runs drafted. With 0, both sides did the same work and the ratios are noise."""
        return sum(stats.drafted for stats in self.drafted)

    def remarks(self) -> list[str]:
        """Returns what the figures mean: whether drafts can change text, and what limits the figures.

        Limits are that nothing was drafted, that joules are estimated or missing, or that the machine was busy.
        """
        sentences = [*([] if self.drafted_tokens else [NOTHING_DRAFTED]), self.rows.sentence()]
        if not self.follows_from_medians:
            sentences.append("the speed-up is the median of the ratios of neighbouring runs: the machine's speed changed between runs")
        if self.drafted_energy.kind == "estimate" and not self.energy_is_comparable:
            sentences.append("energy: nothing was measured, and the ranges of the estimate overlap, so it is not shown")
        elif self.drafted_energy.kind == "measured" and self.drafted_energy.facts and self.drafted_energy.facts.scope is Scope.GPU:
            sentences.append(f"energy: scope {scope_words(Scope.GPU)}, idle power included")
        elif self.drafted_energy.kind == "estimate" and self.drafted_energy.facts:
            sentences.append(f"energy: nothing was measured; {self.drafted_energy.facts.source}, with the range of these watts")
        missing = [_missing(energy) for energy in (self.plain_energy, self.drafted_energy) if energy.kind == "none"][:1]
        estimated = self.prompt_energy.facts is not None and self.prompt_energy.facts.is_estimate
        if not missing and self.prompt_energy.kind == "none" and not estimated:
            missing = [f"energy of the prompt: not measured: {self.prompt_energy.sentence()}"]
        sentences += missing
        return [*sentences, f"meanwhile, {self.load.sentence()}"] if self.load.is_busy else sentences

    def to_json(self) -> dict[str, Any]:
        """Returns plain values under stable keys; `speed_up` is None if nothing was drafted."""
        record = self.runs_json() | self.conditions_json()
        return record | {
            "speed_up": self.speed_up if self.drafted_tokens else None,
            "drafted_tokens": self.drafted_tokens,
            "drafting": self.drafting,
            "draft_length": self.draft_length,
            "rows": self.rows.to_json(),
            "peak_memory_bytes": self.peak_memory,
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
    meter_named: bool = False,
    waiting: Waiting = silent_wait,
) -> Comparison:
    """Runs without and with drafts alternately, `repeats` times each. `show` gets the text of the first run of each kind.

    With `draft_length` None, the session's settings decide. `watch` returns the energy measurement of one run. `meter_named` is as in
    `Conditions`.
    """
    drafting = f"policy {session.settings.policy}" if draft_length is None else f"drafts of {draft_length}"
    rows = session.row_equality(waiting=waiting)  # compared on first use, before anything is shown
    runs = RunsInTurn(watch, show)

    def request(number: int) -> Generation:
        return session.generate(prompt, max_tokens=max_tokens, draft_length=draft_length if number % 2 else 0)

    for number, heading in enumerate(("plain", drafting)):
        show(f"\n--- {heading} ---\n{shown_prompt}")
        runs.run(request(number), drafting=bool(number), show=show)
    show("\n\n")
    with waiting(f"the same again, {repeats - 1} times without and with drafts in turn") as report:
        for number in range(2, 2 * repeats):
            report((number - 2) / (2 * repeats - 2))
            runs.run(request(number), drafting=number % 2 == 1)
    return Comparison(
        **vars(runs.paired()),
        **vars(runs.conditions()) | {"meter_named": meter_named},
        drafting=drafting,
        draft_length=draft_length,
        rows=rows,
        peak_memory=peak_memory_bytes(),
    )


def _missing(energy: RunEnergy) -> str:
    """Returns why a side has no figure. If the machine has no meter, also names the command that lists meters."""
    if energy.facts is not None:
        return ": ".join(energy.row())
    return f"energy was not measured: {energy.sentence()}; edge-devices meters lists what this machine has"


def _energy_rows(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Returns the rows of the existing figures. A remark says why one is missing."""
    plain, drafted, prompt = comparison.plain_energy, comparison.drafted_energy, comparison.prompt_energy
    rows = [_energy_row(comparison)] if None not in (plain.joules_per_token, drafted.joules_per_token) else []
    return rows if prompt.joules_per_token is None else [*rows, _prompt_energy_row(comparison)]


def _prompt_energy_row(comparison: Comparison) -> tuple[str, str, str]:
    energy = comparison.prompt_energy
    assert energy.joules_per_token is not None
    if energy.kind == "estimate" and energy.joules_per_token.low <= 0 and not comparison.meter_named:  # as for two ranges that overlap
        return "energy, J/prompt token", "not determined", "-"
    name = "J/prompt token, an ESTIMATE" if energy.kind == "estimate" else "energy, J/prompt token"
    return name, energy.figure().partition(" (")[0], "the same"


def _energy_row(comparison: Comparison) -> tuple[str, str, str]:
    energies = (comparison.plain_energy, comparison.drafted_energy)
    if any(energy.joules_per_token is None for energy in energies):
        return "energy, J/token", "not measured", "not measured"
    if not comparison.energy_is_comparable:
        return "energy, J/token", "not determined", "not determined"
    plain, drafted = (energy.figure() for energy in energies)
    if energies[0].kind == "estimate":
        return "J/token, an ESTIMATE", plain.partition(" (")[0], drafted.partition(" (")[0]
    scope = f", scope {energies[0].facts.scope}" if energies[0].facts else ""
    return f"energy, J/token{scope}", plain, drafted


def _median(runs: tuple[DecodeStats, ...], figure: Callable[[DecodeStats], float]) -> float:
    return statistics.median(map(figure, runs))


def comparison_table(comparison: Comparison) -> Table:
    """Returns a table of medians: one column without drafts, one with."""
    from rich.table import Table

    table = Table(title=f"medians of {runs} runs each, in turn" if (runs := len(comparison.plain)) > 1 else "one run each")
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column(comparison.drafting, justify="right")
    plain, drafted = comparison.plain, comparison.drafted
    table.add_row("tok/s", *(f"{_median(r, lambda s: s.tokens_per_second):.1f}" for r in (plain, drafted)))
    ratios = comparison.ratios
    ratio = f"{comparison.speed_up:.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if comparison.drafted_tokens else "nothing drafted"
    table.add_row("speed-up over plain", "1.00", ratio)
    for position, share in enumerate(drafted[0].acceptance_by_position, start=1):
        table.add_row(f"accepted at draft {position}", "-", f"{share:.1%}")
    if (rate := drafted[0].acceptance_rate) is not None:
        table.add_row("acceptance rate", "-", f"{rate:.1%}")
    table.add_row("mean acceptance length", *(f"{_median(r, lambda s: s.mean_acceptance_length):.2f}" for r in (plain, drafted)))
    table.add_row("prompt tokens", *(f"{_median(r, lambda s: s.prompt_tokens):g}" for r in (plain, drafted)))
    table.add_row("time to first token, ms", *(f"{_median(r, lambda s: 1000 * s.first_token_seconds):.1f}" for r in (plain, drafted)))
    table.add_row("prompt tok/s", *(f"{_median(r, lambda s: s.prompt_tokens / s.first_token_seconds):.0f}" for r in (plain, drafted)))
    table.add_row("tokens", str(plain[0].tokens), str(drafted[0].tokens))
    for row in _energy_rows(comparison):
        table.add_row(*row)
    table.add_row("same output", "", "yes" if comparison.same_tokens else "no (see --verify-lossless)")
    table.add_row("peak memory of the process, MB", "", f"{comparison.peak_memory / 1e6:.0f}")
    return table


def devices_table(comparisons: dict[str, Comparison]) -> Table:
    """Returns a table of medians with a column for each device. The devices ran one after the other, not in turn."""
    from rich.table import Table

    def row(name: str, cell: Callable[[Comparison], str]) -> None:
        table.add_row(name, *(cell(each) for each in comparisons.values()))

    def acceptance(each: Comparison) -> str:
        rate = each.drafted[0].acceptance_rate
        return "-" if rate is None else f"{rate:.1%}"

    table = Table(title="medians, one device after the other")
    for heading in ("", *comparisons):
        table.add_column(heading, justify="right" if heading else "left")
    first = next(iter(comparisons.values()))
    row("tok/s, plain", lambda each: f"{_median(each.plain, lambda stats: stats.tokens_per_second):.1f}")
    row(f"tok/s, {first.drafting}", lambda each: f"{_median(each.drafted, lambda stats: stats.tokens_per_second):.1f}")
    row("speed-up by drafts", lambda each: f"{each.speed_up:.2f}" if each.drafted_tokens else "nothing drafted")
    row("acceptance rate", acceptance)
    row("time to first token, ms", lambda each: f"{_median(each.drafted, lambda stats: 1000 * stats.first_token_seconds):.1f}")
    if any(each.plain_energy.kind != "none" for each in comparisons.values()):
        row("plain, J/token", lambda each: _energy_row(each)[1])
        row("with drafts, J/token", lambda each: _energy_row(each)[2])
    row("drafts left the text as it was", lambda each: "yes" if each.same_tokens else "no")
    row("text of the first column", lambda each: "yes" if each.output == first.output else "no")
    return table
