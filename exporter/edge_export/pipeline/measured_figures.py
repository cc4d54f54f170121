"""Figures of a bundle that `edge-bench run --json` measured on a device, as tables of its model card.

They are taken only for the bundle whose files they name; fields: docs/measuring.md.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_devices.errors import errors_as, one_line
from edge_devices.files.limited_read import read_at_most
from edge_devices.files.typed_json import from_json
from edge_export.errors import ExportError
from edge_runtime.bundle.manifest import Manifest
from edge_runtime.drafting.policies import DEFAULT_POLICY

_MAX_BYTES = 16 << 20
_PLAIN = "plain"
_MAX_NUMBER = 1e15
# An interval whose ends differ by more than this factor says nothing, as in the tables of edge-bench.
_WIDEST = 4
_NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True)
class FigureFile:
    """A file of the bundle that was measured."""

    role: str
    format: str
    quantization: str | None
    bytes: int


@dataclass(frozen=True, kw_only=True)
class FigureHeader:
    """When, where and how the bundle was measured."""

    version: str
    created_at: str
    files: tuple[FigureFile, ...]
    machine: dict[str, Any]
    settings: dict[str, Any]
    engines: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """A figure with its 95 % interval; None: no bound."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class FigureVariant:
    """How drafts were made: `policy` is plain, fixed, or what chose their length."""

    policy: str


@dataclass(frozen=True, kw_only=True)
class FigureRow:
    """A variant over all texts, or over those of one kind (`domain`)."""

    label: str
    variant: FigureVariant
    domain: str | None
    tokens_per_second: float
    first_token_seconds: float | None
    speed_up: Bounds | None
    acceptance_rate: float | None
    acceptance_by_position: tuple[float, ...]
    mean_acceptance_length: float | None
    equal: int
    compared: int


@dataclass(frozen=True, kw_only=True)
class FigureCosts:
    """Seconds of a target forward of n rows (`verify_seconds[n - 1]`) and of one draft step, after `length` tokens."""

    length: int
    verify_seconds: tuple[float, ...]
    draft_step_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class FigureJoules:
    """Joules of one variant, idle power included."""

    name: str
    joules_per_output_token: Bounds | None


@dataclass(frozen=True, kw_only=True)
class FigureEnergy:
    """What a meter of this scope read; `estimate`: watts of a model, nothing was read."""

    meter: str
    scope: str
    estimate: bool
    variants: tuple[FigureJoules, ...]


@dataclass(frozen=True, kw_only=True)
class MeasuredFigures:
    """What the card takes of one file of figures."""

    header: FigureHeader
    overall: tuple[FigureRow, ...]
    by_domain: tuple[FigureRow, ...]
    cost_curves: tuple[FigureCosts, ...]
    energy: FigureEnergy | None
    notes: tuple[str, ...]


def read_figures(path: Path, manifest: Manifest) -> MeasuredFigures:
    """Reads a file of figures. Raises ExportError for another file, and for figures of another bundle."""
    advice = "give a file that edge-bench run BUNDLE --json wrote"
    with errors_as(ExportError, f"{path} cannot be read", advice, OSError):
        data = read_at_most(path, _MAX_BYTES)
    with errors_as(ExportError, f"{path} holds no figures", advice, ValueError, RecursionError, OverflowError):
        figures = from_json(MeasuredFigures, json.loads(data.decode()), "figures")
    measured = {(file.role, file.format, file.quantization, file.bytes) for file in figures.header.files}
    if measured != {(file.role, file.format, file.quantization, file.bytes) for file in manifest.files}:
        raise ExportError(f"{path} measures another bundle than this one, by the sizes of their files; measure this one")
    return figures


def measured_lines(figures: Sequence[MeasuredFigures]) -> Iterator[str]:
    """Yields a card's sections: one for each file of figures, and a sentence if there is none. Raises ExportError for odd numbers."""
    if not figures:
        yield "## On devices\n"
        yield "Not measured: speed, acceptance by kind of text, cost curve, joules per token. `edge-bench run FOLDER` measures them.\n"
    for each in figures:
        yield f"## Measured on {_machine(each.header)}\n"
        yield from (f"- {card_text(note)}" for note in each.notes)
        yield from (("",) if each.notes else ())
        yield from _kinds_of_text(each)
        yield from _positions(each)
        yield from _costs(each)
        yield from _joules(each)


def _machine(header: FigureHeader) -> str:
    machine, settings = header.machine, header.settings
    model = machine.get("model") or machine.get("processor") or machine.get("architecture") or "an unknown machine"
    processor = card_text(str(model))
    versions = ", ".join(
        f"{card_text(name)} {card_text(number)}" for name, number in {"edge-mtp": header.version, **header.engines}.items()
    )
    threads, backend = card_text(str(settings.get("threads", "?"))), card_text(str(settings.get("backend", "?")))
    repeats = card_text(str(settings.get("repeats", "?")))
    return f"{processor}, {card_text(header.created_at[:10])}: {backend}, {threads} threads, {repeats} repeats ({versions})"


def _kinds_of_text(figures: MeasuredFigures) -> Iterator[str]:
    """Plain decoding beside the default policy; beside the first variant that drafts if the default was not measured."""
    drafting = [row for row in figures.overall if row.variant.policy != _PLAIN]
    chosen = next((row for row in drafting if row.variant.policy == DEFAULT_POLICY), next(iter(drafting), None))
    if chosen is None:
        yield "Speed and acceptance by kind of text: not measured.\n"
        return
    yield f"Drafts of `{card_text(chosen.label)}` by kind of text:\n"
    yield _head("kind of text", "tok/s", "times plain [95 %]", "drafts accepted", "tokens per forward", "first token, ms", "same text")
    rows = [row for row in figures.by_domain if row.label == chosen.label]
    for row in (*rows, chosen):
        same = f"{row.equal} of {row.compared}" if row.compared else _NOT_MEASURED
        first = None if row.first_token_seconds is None else 1000 * row.first_token_seconds
        cells = (_number(row.tokens_per_second), _speed_up(row.speed_up), _share(row.acceptance_rate), _number(row.mean_acceptance_length))
        yield _row(row.domain or "all", *cells, _number(first), same)
    yield ""


def _positions(figures: MeasuredFigures) -> Iterator[str]:
    rows = [row for row in figures.overall if row.acceptance_by_position]
    longest = max((len(row.acceptance_by_position) for row in rows), default=0)
    if not rows:
        yield "Acceptance by draft position: not measured.\n"
        return
    yield "Share of the drafts at a position that were accepted, of those proposed there:\n"
    yield _head("", *(f"draft {place + 1}" for place in range(longest)))
    for row in rows:
        shares = [_share(value) for value in row.acceptance_by_position]
        yield _row(row.label, *shares, *[""] * (longest - len(shares)))
    yield ""


def _costs(figures: MeasuredFigures) -> Iterator[str]:
    if not figures.cost_curves:
        yield "Cost curve: not measured.\n"
    for curve in figures.cost_curves:
        verify = [1000 * _checked(seconds) for seconds in curve.verify_seconds]
        step = None if curve.draft_step_seconds is None else 1000 * curve.draft_step_seconds
        yield f"Cost curve after {_number(curve.length)} tokens; a draft step takes {_number(step)} ms:\n"
        yield _head("target forward of", *(f"{rows}" for rows in range(1, len(verify) + 1)))
        yield _row("ms", *map(_number, verify))
        yield _row("times the first", *(_number(each / verify[0]) if verify[0] else "" for each in verify)) + "\n"


def _joules(figures: MeasuredFigures) -> Iterator[str]:
    energy = figures.energy
    if energy is None:
        yield "Joules per token: not measured.\n"
        return
    label = "ESTIMATE, no meter was read" if energy.estimate else "measured"
    yield f"Joules per output token: {label}, {card_text(energy.meter)}, scope {card_text(energy.scope)}, idle power included.\n"
    yield _head("", "J/token [95 %]")
    for variant in energy.variants:
        yield _row(variant.name, _interval(variant.joules_per_output_token))
    yield ""


def _head(first: str, *others: str) -> str:
    return f"| {first} | {' | '.join(others)} |\n|:--|{'--:|' * len(others)}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(map(card_text, cells))} |"


def card_text(text: str) -> str:
    """A text from elsewhere, as words of a card: no markup, no line ends."""
    return html.escape(one_line(text), quote=False).replace("|", "\\|").replace("`", "'").replace("[", "\\[") if text else ""


def _checked(value: float) -> float:
    if not 0 <= value < _MAX_NUMBER:
        raise ExportError(f"the figures hold {str(value)[:40]}, which no benchmark measures; measure again")
    return float(value)


def _number(value: float | None) -> str:
    return _NOT_MEASURED if value is None else f"{_checked(value):.3g}"


def _share(value: float | None) -> str:
    return "no drafts" if value is None else f"{_checked(value):.0%}"


def _interval(figure: Bounds | None) -> str:
    if figure is None:
        return _NOT_MEASURED
    if figure.low is None or figure.high is None:
        return _number(figure.value)
    return f"{_number(figure.value)} ({_signed(figure.low)} to {_signed(figure.high)})"


def _speed_up(ratio: Bounds | None) -> str:
    uneven = ratio is not None and ratio.low is not None and ratio.high is not None and ratio.high > _WIDEST * ratio.low
    return "not determined, the runs differ too much" if uneven else _interval(ratio)


def _signed(value: float) -> str:
    """A bound, which may lie below zero."""
    return f"-{_number(-value)}" if value < 0 else _number(value)
