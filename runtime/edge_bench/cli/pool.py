"""`edge-bench pool`: checks contributed records and puts those that are valid into tables."""

from __future__ import annotations

from pathlib import Path

import click

from edge_bench.cli.outputs import Outputs
from edge_bench.contribution.pool import pool_records, pool_tables
from edge_bench.report.tables import print_tables
from edge_devices.command_line import PanelCommand, takes


@click.command(cls=PanelCommand)
@click.argument("places", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--verify-key",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PUBKEY",
    help="Refuse records that are not signed with this Ed25519 key (PEM). Needs edge-mtp[sign].",
)
@takes("outputs", Outputs, only=["json_path"])
def pool(places: tuple[Path, ...], verify_key: Path | None, outputs: Outputs) -> None:
    """Check the files of contribute below the PATHs, and print a table of those that are valid."""
    records = pool_records(places, verify_key)
    if outputs.write_json(records.to_json()):
        print_tables(pool_tables(records))
