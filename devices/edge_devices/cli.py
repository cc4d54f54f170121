"""`edge-devices`: what this machine is."""

from __future__ import annotations

import json

import click

from edge_devices.machine import read_machine


@click.group(epilog="\b\nExamples:\n  edge-devices detect\n  edge-devices detect --json")
@click.version_option(package_name="edge-mtp")
def main() -> None:
    """Look at the device this runs on."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def detect(as_json: bool) -> None:
    """Read processor, cores, features and memory of this machine."""
    machine = read_machine()
    if as_json:
        click.echo(json.dumps(machine.to_json()))
        return
    click.echo(f"{machine.system} {machine.architecture}, {machine.processor or 'unknown processor'}")
    click.echo(f"processors this process may use: {machine.usable_processors}")
    memory = f"{machine.memory_available / 1e9:.1f} GB" if machine.memory_available is not None else "unknown"
    click.echo(f"memory available: {memory}")
    click.echo(f"features: {' '.join(machine.features) or 'unknown'}")
