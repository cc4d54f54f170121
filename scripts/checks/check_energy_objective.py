"""Measures what the objective energy spends and saves within its bound on 240 simulated machines and texts, beside the best mix.

    python scripts/checks/check_energy_objective.py --slowdown 0.05
    python scripts/checks/check_energy_objective.py --seed 3         # other texts
    python scripts/checks/check_energy_objective.py --drawn 12       # other machines, drawn with this seed

The machines are those of tests/support/simulated_joules.py; no constant was chosen on the others. About four minutes each on a machine that
does nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import click

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

from simulated_joules import CASES, SEEDS, WATTS, Regret, drawn, regret

HEAD = "| watts of draft, verify, plain | cases | time, worst | joules | regret | worst | over 15 % | over the bound | worse in both |"


def row(name: str, cases: Sequence[Regret], slowdown: float) -> str:
    """A row of the table; time and joules are relative to the objective time."""
    slower, regrets = [case.slower for case in cases], [case.regret for case in cases]
    cells = [
        name,
        len(cases),
        f"{fmean(slower):.3f}, {max(slower):.3f}",
        f"{fmean(case.joules for case in cases):.3f}",
        f"{fmean(regrets):+.1%}",
        f"{max(regrets):+.1%}",
        sum(share > 0.15 for share in regrets),
        sum(ratio > 1 + slowdown for ratio in slower),
        sum(case.is_worse_in_both for case in cases),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


@click.command()
@click.option("--slowdown", default=0.05, show_default=True, help="The most time per token that fewer joules may cost, as a share.")
@click.option("--tokens", default=2000, show_default=True, help="Tokens of each run.")
@click.option("--seed", default=SEEDS[0], show_default=True, help="Of the first of two texts.")
@click.option("--drawn", "machines", type=int, help="Take as many machines that are drawn with this seed.")
@click.option("--every", default=1, show_default=True, help="Take each so-manieth case.")
@click.option("--json", "as_json", is_flag=True, help="Print every case as a line of JSON.")
def main(slowdown: float, tokens: int, seed: int, machines: int | None, every: int, as_json: bool) -> None:
    """Prints a row for each set of watts and one for all."""
    cases = []
    for case in (CASES if machines is None else drawn(machines, len(CASES)))[::every]:
        cases.append(regret(case, slowdown, tokens=tokens, seeds=(seed, seed + 1)))
        if as_json:
            click.echo(json.dumps(asdict(cases[-1])))
    if as_json:
        return
    click.echo(HEAD + "\n|:--|--:|--:|--:|--:|--:|--:|--:|--:|")
    for watts in WATTS:
        if of_watts := [done for done in cases if done.case.watts == watts]:
            click.echo(row(watts, of_watts, slowdown))
    click.echo(row("all", cases, slowdown))


if __name__ == "__main__":
    main()
