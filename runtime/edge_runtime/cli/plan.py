"""`--plan`: what a pair will do on this machine or on a profile's device, and beside it what it did. For commands: it looks at the machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import click

from edge_devices.command_line import option_group
from edge_devices.machine.profiles import profiles
from edge_runtime.cli.plan_measuring import Measured
from edge_runtime.planning.speed import Range, SpeedPlan, deviation


@dataclass(frozen=True, kw_only=True)
class PlanValues:
    """What was asked for; `profile` None is this machine."""

    plan: bool
    profile: str | None


plan_options = option_group(
    click.option("--plan", is_flag=True, help="Predict memory, speed, best draft length and joules per token, with ranges; make nothing."),
    click.option(
        "--profile",
        metavar="NAME",
        shell_complete=lambda _context, _parameter, start: [name for name in profiles() if name.startswith(start)],
        help="With --plan: a device profile, such as raspberry-pi-5.  [default: this machine]",
    ),
)


def plan_values(values: dict[str, Any]) -> PlanValues:
    """Takes the options' values out of all the command's. A usage error for a device without a plan."""
    found = PlanValues(plan=values.pop("plan"), profile=values.pop("profile"))
    if found.profile is not None and not found.plan:
        raise click.UsageError("--profile is for --plan; leave it out")
    return found


def show_plan(plan: SpeedPlan, measured: Measured | None, *, as_json: bool) -> None:
    """Prints the plan, and the measurement beside it if there is one."""
    if as_json:
        record: dict[str, Any] = {"plan": plan.to_json()}
        if measured is not None:
            record["measured"] = asdict(measured)
        click.echo(json.dumps(record, ensure_ascii=False))
        return
    for line in plan_lines(plan, measured):
        click.echo(line)


def plan_lines(plan: SpeedPlan, measured: Measured | None = None) -> list[str]:
    """Returns the plan for people: each figure with its range, what was measured and how far off the middle was, then how each came about."""
    low, best, high = plan.draft_length
    rows: list[tuple[str, str, Range, float | None]] = [
        (
            "memory",
            "MB",
            Range(low=plan.memory.reserved / 1e6, middle=plan.memory.total / 1e6, high=1.1 * plan.memory.total / 1e6),
            measured.memory_bytes / 1e6 if measured else None,
        ),
        ("prefill", "tok/s", plan.prefill, measured.prefill if measured else None),
        ("plain", "tok/s", plan.plain, measured.plain if measured else None),
        ("drafted", "tok/s", plan.drafted, measured.drafted if measured else None),
        ("draft step", "ms", plan.step_seconds.times(1000), measured.step_seconds * 1000 if measured else None),
        ("draft length", "", Range(low=low, middle=best, high=high), measured.draft_length if measured else None),
    ]
    lines = [f"{plan.device}:"]
    for name, unit, value, seen in rows:
        text = f"  {name:<13}{_text(value.middle):>8}  [{_text(value.low)}, {_text(value.high)}] {unit}".rstrip()
        lines.append(text if seen is None else f"{text:<48}  measured {_text(seen)} (prediction {deviation(seen, value)})")
    joules = plan.joules_per_token
    lines.append("  J/token      " + (f"{_text(joules.middle):>8}  [{_text(joules.low)}, {_text(joules.high)}]" if joules else "not known"))
    return lines + ["how:"] + [f"  {name}: {how}" for name, how in plan.derived.items()]


def _text(value: float) -> str:
    """Three digits, and no exponents."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
