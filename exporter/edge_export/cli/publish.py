"""`edge-export publish`: uploads a bundle to the Hugging Face hub, with its model card."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from edge_devices.command_line import PanelCommand, one_sentence_errors
from edge_devices.errors import one_line
from edge_export.cli.display import size_table
from edge_export.pipeline.publish import publication
from edge_runtime.cli.options import BundlePath


@click.command(cls=PanelCommand)
@click.argument("bundle", type=BundlePath())
@click.argument("repository", metavar="OWNER/NAME")
@click.option(
    "--figures",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    multiple=True,
    metavar="FILE",
    help="Figures of this bundle for its card, by edge-bench run --markdown. Repeatable.",
)
@click.option("--public", is_flag=True, help="Let everybody read a new repository.  [default: private]")
@click.option("--dry-run", is_flag=True, help="Print what would be uploaded, and the model card; ask nothing of the hub.")
@one_sentence_errors(stopped="stopped; the same command goes on")
def publish(bundle: Path, repository: str, figures: tuple[Path, ...], public: bool, dry_run: bool) -> None:
    """Upload BUNDLE and its model card to OWNER/NAME on the Hugging Face hub.

    It needs the hub's token (hf auth login). After an interruption, run the same command again: it continues.
    """
    console = Console(stderr=True)
    planned = publication(bundle, repository, figures)
    console.print(size_table(planned.repository, "file", planned.tree()))
    if dry_run:
        click.echo(planned.card)
        return
    uploaded, others = planned.upload(private=not public)
    if others:
        names = one_line(", ".join(others[:5])) + (" ..." if len(others) > 5 else "")
        console.print(f"What was in the repository stays beside the bundle: {names}.", markup=False, highlight=False, soft_wrap=True)
    if uploaded.private == public:
        state = "private" if uploaded.private else "public"
        console.print(f"The repository is {state} as before; the hub's settings change that.", highlight=False, soft_wrap=True)
    click.echo(uploaded.address)
