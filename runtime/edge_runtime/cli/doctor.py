"""`edge-run doctor`: prints the diagnosis as a table or as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge_devices.command_line import PanelCommand
from edge_devices.machine.memory import byte_text
from edge_devices.machine.system import System
from edge_devices.meters.base import MeterState
from edge_runtime.backends.selection import BACKENDS, CARDS, load_backend
from edge_runtime.cli.diagnosis import Diagnosis, diagnose

if TYPE_CHECKING:
    from rich.table import Table

Row = tuple[str, str, str]
_COLOURS = {"ok": "green", "missing": "yellow", "broken": "red", "denied": "yellow"}


@click.command(cls=PanelCommand)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Show what works on this machine and what is missing."""
    show_diagnosis(diagnose(System()), as_json=as_json)


def show_diagnosis(diagnosis: Diagnosis, *, as_json: bool) -> None:
    """Prints the diagnosis on standard output."""
    if as_json:
        click.echo(json.dumps(diagnosis.to_json()))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(diagnosis_table(diagnosis))
    missing = f"no bundle can run here yet: a backend ({' or '.join(BACKENDS)}) is missing"
    console.print("bundles can run here" if diagnosis.ready else missing)
    if diagnosis.install:
        # Not wrapped, so that it can be copied.
        console.print(
            f"to install what is missing (leave out the extras that you do not need):\n{diagnosis.install}", soft_wrap=True, markup=False
        )


def diagnosis_table(diagnosis: Diagnosis) -> Table:
    """Returns a table of subject, state and finding."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for what, state, finding in rows(diagnosis):
        table.add_row(what, Text(state, style=_COLOURS.get(state, "")), Text(finding))
    return table


def rows(diagnosis: Diagnosis) -> Iterator[Row]:
    """Yields subject, state (ok, missing, broken, denied, or empty for plain information) and finding."""
    device = diagnosis.device
    machine = device.machine
    memory = f", {byte_text(machine.memory_available)} available" if machine.memory_available is not None else ""
    yield "edge-mtp", "ok", f"{diagnosis.version}, Python {diagnosis.python}, {diagnosis.executable}"
    yield (
        "machine",
        "",
        f"{machine.system} {machine.architecture}, {machine.processor or 'unknown processor'}, "
        f"{machine.usable_processors} processors{memory}",
    )
    yield "profile", "", f"{device.profile.name}: {device.profile.quantization}, {device.threads} threads ({device.why})"
    yield from _backend_rows(diagnosis)
    yield from _choice_rows(diagnosis)
    for extra in diagnosis.extras:
        if extra.name not in diagnosis.backends:
            versions = ", ".join(f"{name} {version}" for name, version in extra.installed.items())
            lacking = f"; missing: {', '.join(extra.missing)}" if extra.missing else ""
            yield (
                extra.name,
                "missing" if extra.missing else "ok",
                f"{extra.purpose}: {versions or 'none of its packages is installed'}{lacking}",
            )
    yield from _meter_rows(diagnosis)
    yield from _cache_rows(diagnosis)


def _backend_rows(diagnosis: Diagnosis) -> Iterator[Row]:
    for kind, description in diagnosis.backends.items():
        card = CARDS[kind]
        if description is None:
            lacking = [tool for tool, path in diagnosis.build_tools.items() if path is None] if card.compiled else []
            needs = f"which needs {' and '.join(lacking)} first (Debian: apt install cmake g++)"
            tools = f"; installing it compiles {card.title}, {needs}" if lacking else ""
            yield card.title, "missing", f"runs {card.format.upper()} bundles: {card.package} is not installed{tools}"
        elif "error" in description:
            versions = next((extra.installed for extra in diagnosis.extras if extra.name == kind), {})
            installed = versions.get(card.package) if "died of" in description["error"] else None
            remedy = load_backend(kind).remedy(installed) if installed else None
            yield card.title, "broken", f"{description['error']}{f'; {remedy}' if remedy else ''}"
        else:
            yield from load_backend(kind).findings(description)


def _choice_rows(diagnosis: Diagnosis) -> Iterator[Row]:
    for choice in diagnosis.choices:
        yield "faster backend", "ok", f"{choice.bundle}: {choice.sentence()}, as measured on first use"


def _meter_rows(diagnosis: Diagnosis) -> Iterator[Row]:
    shown = False
    for finding in diagnosis.meters:
        if finding.meter is not None:
            facts = finding.meter.facts
            yield "energy meter", "ok", f"{facts.name}: {facts.kind}, scope {facts.scope}"
        elif finding.state is MeterState.PRESENT:
            yield "energy meter", "denied", f"{finding.name}: {finding.reason}" + (f"; {finding.remedy}" if finding.remedy else "")
        shown = shown or finding.state is not MeterState.ABSENT
    if not shown:
        yield "energy meter", "", f"none of {len(diagnosis.meters)} kinds found (see edge-devices meters); only energy figures need one"


def _cache_rows(diagnosis: Diagnosis) -> Iterator[Row]:
    files = [f"{Path(file.path).name}: {file.entries} entries ({byte_text(file.bytes)})" for file in diagnosis.cache_files]
    yield "cache", "", f"{diagnosis.cache} (${diagnosis.cache_variable}): {'; '.join(files) or 'empty'}"
