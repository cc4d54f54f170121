"""`edge-export publish`: uploads a bundle to the Hugging Face hub, with its model card."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from edge_devices.command_line import PanelCommand, one_sentence_errors
from edge_devices.errors import one_line
from edge_devices.machine.memory import byte_text
from edge_export.pipeline.publish import Publication, publication
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
    console.print(_tree(planned))
    if dry_run:
        click.echo(planned.card)
        return
    uploaded = planned.upload(private=not public)
    if uploaded.others:
        names = one_line(", ".join(uploaded.others[:5])) + (" ..." if len(uploaded.others) > 5 else "")
        console.print(f"What was in the repository stays beside the bundle: {names}.", markup=False, highlight=False, soft_wrap=True)
    if uploaded.private == public:
        state = "private" if uploaded.private else "public"
        console.print(f"The repository is {state} as before; the hub's settings change that.", highlight=False, soft_wrap=True)
    click.echo(uploaded.address)


def _tree(planned: Publication) -> Table:
    """The files of the repository with their sizes."""
    table = Table(title=planned.repository, title_justify="left")
    table.add_column("file", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    for name, size in planned.tree():
        table.add_row(Text(name), byte_text(size))  # a name may hold what looks like rich's markup
    table.add_section()
    table.add_row("total", byte_text(sum(size for _, size in planned.tree())))
    return table
