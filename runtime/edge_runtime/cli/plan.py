"""`--plan`: what a pair will do on this machine or on a profile's device, and beside it what it did. For commands: it looks at the machine."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np

from edge_devices.command_line import option_group
from edge_devices.errors import DeviceError
from edge_devices.machine.bandwidth import read_bandwidth
from edge_devices.machine.detection import detect_device
from edge_devices.machine.profiles import profile, profiles
from edge_devices.machine.system import System
from edge_runtime.bundle.kv_types import check_kv_type
from edge_runtime.bundle.manifest import Manifest
from edge_runtime.cli.plan_measuring import Measured
from edge_runtime.config.settings import LONGEST
from edge_runtime.drafting.drafter_kinds import DrafterKind
from edge_runtime.drafting.phase_power import PhasePower
from edge_runtime.errors import RequestError
from edge_runtime.planning.memory import Opening, memory_plan
from edge_runtime.planning.speed import DRAFTER_ROLES, DeviceSpeed, Range, SpeedPlan, deviation, pair_facts, speed_plan

# Share of a memory type's peak that a processor is assumed to read at.
OF_PEAK = (0.35, 0.75)
# Reading in a forward / reading alone: kernels unpack weights and wait for each other; and what else the machine does slows the probe too.
OF_READ = (0.7, 1.1)
# Operations of a forward of few rows / those of a large float32 product: 8-bit arithmetic is faster, few rows fill the units less.
OF_PRODUCT = (0.4, 1.6)
# Operations that a device whose arithmetic nobody described does in the time in which it reads a byte: few cores, and many or matrix units.
BALANCE = (6.0, 45.0)
# Side of the matrices of that product, and how often it is timed.
_SIDE, _TIMES = 768, 6


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


def device_speed(name: str | None, threads: int | None) -> DeviceSpeed:
    """Returns the numbers of a profile, or of this machine by two probes of some tenths of a second. Raises RequestError."""
    try:
        return _profile_speed(name) if name is not None else _machine_speed(threads)
    except DeviceError as error:
        raise RequestError(str(error)) from error


def manifest_plan(
    manifest: Manifest,
    device: DeviceSpeed,
    *,
    context: int,
    kv_type: str = "f16",
    longest: int = LONGEST,
    drafter: DrafterKind | None = None,
    power: PhasePower | None = None,
) -> SpeedPlan:
    """Returns the plan of a pair's GGUF files; `drafter` None is the split one where there is one. Raises RequestError."""
    from edge_runtime.backends.llama.context import BATCH

    roles = {file.role for file in manifest.files if file.format in ("gguf", "safetensors")}
    there = [kind for kind, needed in DRAFTER_ROLES.items() if roles.issuperset(needed)]
    chosen = drafter or (there or ["dense"])[-1]
    if "target" not in roles or chosen not in there:
        raise RequestError(f"the plan is about GGUF files with a dense or split drafter; there are {', '.join(sorted(roles)) or 'none'}")
    kv = check_kv_type(manifest.cache_layout, kv_type)
    opening = Opening(context=context, kv_type=kv, sequences=1, batch=BATCH, verify_rows=longest + 1, drafters=(chosen,), repack=True)
    return speed_plan(pair_facts(manifest, chosen, context, kv), device, memory_plan(manifest, opening), longest, power)


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


def _profile_speed(name: str) -> DeviceSpeed:
    found = profile(name)
    if found.effective_gb_per_s is not None:
        low, high = (value * 1e9 for value in found.effective_gb_per_s)
        source = "the profile's, measured by others"
    elif found.peak_gb_per_s is not None:
        low, high = (share * found.peak_gb_per_s * 1e9 for share in OF_PEAK)
        source = f"{OF_PEAK[0]:.0%} to {OF_PEAK[1]:.0%} of the memory's peak"
    else:
        raise RequestError(f"the profile {name} has no memory speed, it differs from machine to machine; plan there, without --profile")
    return DeviceSpeed(
        name=found.title,
        bandwidth=Range.between(low, high),
        bandwidth_from=source,
        operations=Range.between(BALANCE[0] * low, BALANCE[1] * high),
        operations_from=f"assumed, {BALANCE[0]:g} to {BALANCE[1]:g} for each byte read: profiles say nothing of arithmetic",
    )


def _machine_speed(threads: int | None) -> DeviceSpeed:
    found = detect_device(System())
    threads = threads or found.threads
    read = read_bandwidth(threads, memory_available=found.machine.memory_available)
    if read is None:
        raise RequestError("too little memory is left to probe its speed; close other programs, or name a profile with --profile")
    # The product runs on all processors that this process may use, whatever `threads` is.
    product = product_operations() * min(1.0, threads / found.machine.usable_processors)
    return DeviceSpeed(
        name=f"this machine ({found.machine.processor or found.profile.title}, {threads} threads)",
        bandwidth=Range.between(OF_READ[0] * read, OF_READ[1] * read),
        bandwidth_from=f"{OF_READ[0]:g} to {OF_READ[1]:g} x the {read / 1e9:.3g} GB/s it reads",
        operations=Range.between(OF_PRODUCT[0] * product, OF_PRODUCT[1] * product),
        operations_from=f"{OF_PRODUCT[0]:g} to {OF_PRODUCT[1]:g} x the {product / 1e9:.3g} G/s of a float32 product",
    )


def product_operations() -> float:
    """Returns float32 operations per second of this process's matrix product, the best of some tries."""
    matrix = np.ones((_SIDE, _SIDE), dtype=np.float32)
    best = float("inf")
    for _ in range(_TIMES):
        begin = time.perf_counter()
        np.matmul(matrix, matrix)
        best = min(best, time.perf_counter() - begin)
    return 2.0 * _SIDE**3 / max(best, 1e-9)
