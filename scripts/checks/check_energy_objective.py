"""Measures what the objective energy spends and saves within its bound on 240 simulated machines and texts, beside the best mix.

    python scripts/checks/check_energy_objective.py --slowdown 0.05
    python scripts/checks/check_energy_objective.py --seed 3         # other texts
    python scripts/checks/check_energy_objective.py --drawn 12       # other machines, drawn with this seed
    python scripts/checks/check_energy_objective.py --rising 12      # machines whose watts rise with rows, and whose times vary
    python scripts/checks/check_energy_objective.py --changing 12    # the same, with heat, a slower half and a text of two kinds

The machines are those of tests/support/simulated_joules.py and simulated_devices.py. `--every 8` takes 30 of them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean

import click

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

from simulated_devices import changing, rising
from simulated_joules import CASES, SEEDS, WATTS, Case, Regret, drawn, regret

COLUMNS = (
    "watts of draft, verify, plain",
    "cases",
    "time, worst",
    "joules, worst",
    "joules / plain",
    "regret",
    "worst",
    "over 10 %",
    "over the bound",
    "worse in both",
)
DRAWN = {"drawn": drawn, "rising": rising, "changing": changing}


def row(name: str, cases: Sequence[Regret], slowdown: float) -> str:
    """A row of the table; time and joules are relative to the objective time."""
    slower, regrets = [case.slower for case in cases], [case.regret for case in cases]
    cells = [
        name,
        len(cases),
        f"{fmean(slower):.3f}, {max(slower):.3f}",
        f"{fmean(case.joules for case in cases):.3f}, {max(case.joules for case in cases):.3f}",
        f"{fmean(case.of_plain for case in cases):.3f}",
        f"{fmean(regrets):+.1%}",
        f"{max(regrets):+.1%}",
        sum(share > 0.10 for share in regrets),
        sum(ratio > 1 + slowdown for ratio in slower),
        sum(case.is_worse_in_both for case in cases),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


@click.command()
@click.option("--slowdown", default=0.05, show_default=True, help="The most time per token that fewer joules may cost, as a share.")
@click.option("--tokens", default=2000, show_default=True, help="Tokens of each run.")
@click.option("--seed", default=SEEDS[0], show_default=True, help="Of the first of two texts.")
@click.option("--drawn", type=int, help="Take 240 machines that are drawn with this seed.")
@click.option("--rising", type=int, help="Take 240 whose watts rise with rows, drawn with this seed.")
@click.option("--changing", type=int, help="Take 240 that change within a request, drawn with this seed.")
@click.option("--every", default=1, show_default=True, help="Take each so-manieth case.")
@click.option("--json", "as_json", is_flag=True, help="Print every case as a line of JSON.")
@click.option("--processes", default=os.cpu_count, type=click.IntRange(min=1), show_default="processors", help="That share the cases.")
def main(slowdown: float, tokens: int, seed: int, every: int, as_json: bool, processes: int, **seeds: int | None) -> None:
    """Prints a row for each set of watts and one for all."""
    chosen = [(name, number) for name, number in seeds.items() if number is not None]
    if len(chosen) > 1:
        raise click.UsageError(f"--{chosen[0][0]} and --{chosen[1][0]} are two sets of machines; give one")
    machines: Sequence[Case] = DRAWN[chosen[0][0]](chosen[0][1], len(CASES)) if chosen else CASES
    measured = partial(regret, slowdown=slowdown, tokens=tokens, seeds=(seed, seed + 1))
    cases = []
    with ProcessPoolExecutor(processes) as pool:
        for case in pool.map(measured, machines[::every]):
            cases.append(case)
            if as_json:
                click.echo(json.dumps(asdict(case)))
    if as_json:
        return
    click.echo("| " + " | ".join(COLUMNS) + " |\n|:--|" + "--:|" * (len(COLUMNS) - 1))
    for watts in WATTS:
        if of_watts := [done for done in cases if done.case.watts == watts]:
            click.echo(row(watts, of_watts, slowdown))
    click.echo(row("all", cases, slowdown))


if __name__ == "__main__":
    main()
