"""`edge-run tune`: measures at once what sessions otherwise compute and learn from their rounds."""

from __future__ import annotations

from pathlib import Path

import click

from edge_devices.command_line import PanelCommand
from edge_runtime.backends.selection import CARDS
from edge_runtime.calibration.measured import cache_file
from edge_runtime.cli.options import BundlePath, Opening, opens_bundle
from edge_runtime.drafting.cost_model import Costs
from edge_runtime.session.session import Session

EXAMPLES = """
\b
Examples:
  edge-run tune my-bundle                    the faster backend, its threads and costs
  edge-run tune my-bundle --backend onnx     of one backend
"""
_ROWS, _STEPS = (1, 2, 4, 8), 3


@click.command(cls=PanelCommand, epilog=EXAMPLES)
@click.argument("bundle", type=BundlePath())
@opens_bundle()
def tune(bundle: Path, opening: Opening) -> None:
    """Measure the faster backend, its threads and what drafts cost, for later starts.

    It takes seconds. Without it a session estimates these costs from the bundle's sizes and corrects them while it runs. Run it on a
    quiet machine: what a busy one gives is measured again later. What a quiet machine measured is kept.
    """
    with opening.session(bundle, warn=False, measure=True) as session:
        for line in tuned_lines(session, session.costs()):
            click.echo(line)


def tuned_lines(session: Session, costs: Costs) -> list[str]:
    """Returns what was measured: the backend, and seconds (joules, if these are minimized) of verifies and of a draft."""
    unit = "mJ" if session.settings.objective == "energy" else "ms"
    verifies = ", ".join(f"{rows}: {1000 * costs.verify(rows):.3g}" for rows in _ROWS if rows <= session.settings.longest_draft + 1)
    title = CARDS[session.backend].title if session.backend in CARDS else session.backend
    return [
        f"{title}, drafter {session.drafter_kind}{', provisional' if costs.is_provisional else ''}",
        f"verify by rows, {unit}: {verifies}",
        f"draft of {_STEPS}, {unit}: {1000 * costs.draft(_STEPS):.3g}",
        f"kept in {cache_file()}",
    ]
