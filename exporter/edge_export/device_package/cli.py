"""`edge-export package`: its options, and what it prints."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from edge_devices.command_line import option_group
from edge_devices.machine.memory import byte_text
from edge_export.device_package.build import BACKENDS, PackageRequest, make_package
from edge_export.device_package.inventory import Inventory
from edge_export.device_package.platforms import PLATFORMS

_OWN = {"package", "backends", "with_llama_tools", "output", "force", "as_json"}


package_options = option_group(
    click.option(
        "--package", type=click.Choice(list(PLATFORMS)), help="Build a folder that runs bundles on such a device, instead of a bundle."
    ),
    click.option(
        "--with-llama-tools", is_flag=True, help="With --package: add llama.cpp's own tools as static programs, which need no Python."
    ),
    click.option(
        "--backend",
        "backends",
        multiple=True,
        type=click.Choice(BACKENDS),
        help="With --package: a backend to include; may be repeated.  [default: all]",
    ),
    panel="Device packages",
)


def package_request(values: dict[str, Any], output: Path | None, force: bool) -> PackageRequest | None:
    """Removes the group's values from the command's; returns the request, or None without --package.

    Raises a usage error for options that exclude each other.
    """
    platform, backends, tools = (values.pop(name) for name in ("package", "backends", "with_llama_tools"))
    if platform is None:
        if backends or tools:
            raise click.UsageError("--backend and --with-llama-tools are for --package; leave them out")
        return None
    context = click.get_current_context()
    for parameter in context.command.params:
        name = str(parameter.name)
        if name not in _OWN and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--package writes no bundle, so {parameter.opts[0]} has no effect; leave it out")
    if output is None:
        raise click.UsageError("Missing option '-o' / '--output'.")
    there = BACKENDS if PLATFORMS[platform].processors else ("onnx",)
    chosen = tuple(dict.fromkeys(backends)) or there
    if not set(chosen) <= set(there) or (tools and "llama" not in there):
        raise click.UsageError(f"llama.cpp is not compiled for {platform} yet; give --backend onnx, without --with-llama-tools")
    return PackageRequest(platform=platform, output=output, force=force, backends=chosen, tools=tools)


def run_package(request: PackageRequest, as_json: bool) -> None:
    """Builds the package and prints its sizes. Raises ExportError."""
    console = Console(stderr=True)
    with console.status("preparing") as status:
        inventory = make_package(request, status.update, lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True))
    if as_json:
        click.echo(json.dumps({"package": str(request.output), **asdict(inventory)}))
        return
    Console().print(package_table(request.output, inventory))
    console.print(
        f"Licences of all {len(inventory.licences)} components are in {request.output / 'licences'}.", highlight=False, soft_wrap=True
    )


def package_table(folder: Path, inventory: Inventory) -> Table:
    """A table of the package's parts with their sizes."""
    table = Table(title=f"{folder}: {inventory.platform}, {len(inventory.files)} files", title_justify="left")
    table.add_column("part")
    table.add_column("size", justify="right")
    for part, size in sorted(inventory.sizes.items(), key=lambda item: -item[1]):
        table.add_row(part, byte_text(size))
    table.add_section()
    table.add_row("total", byte_text(inventory.bytes))
    return table
