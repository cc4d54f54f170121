"""`edge-export package`: a folder that runs bundles on a device where nothing is installed."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.console import Console

from edge_devices.command_line import PanelCommand, takes
from edge_export.cli.display import Steps, size_table
from edge_export.cli.export import as_json, export_errors
from edge_export.device_package.build import PackageRequest, make_package, possible_backends
from edge_export.device_package.platforms import PLATFORMS
from edge_export.device_package.readme import NAME, copy_command, kernels_sentence


@click.command(cls=PanelCommand)
@click.argument("platform", type=click.Choice(list(PLATFORMS)), metavar="PLATFORM")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), metavar="FOLDER", help="Folder to write the package to.")
@takes("request", PackageRequest(platform="", output=Path(), backends=()))
@as_json
@export_errors()
def package(platform: str, output: Path, request: PackageRequest, as_json: bool) -> None:
    """Build a folder for PLATFORM that runs bundles on a device where nothing is installed."""
    there = possible_backends(PLATFORMS[platform])
    chosen = tuple(dict.fromkeys(request.backends)) or ("onnx",)
    if not set(chosen) <= set(there) or (request.tools and "llama" not in there):
        raise click.UsageError(f"llama.cpp is not compiled for {platform} yet; give --backend onnx, without --with-llama-tools")
    console = Console(stderr=True)
    with Steps(console) as step:
        inventory = make_package(replace(request, platform=platform, output=output, backends=chosen), step, step.note)
    if as_json:
        click.echo(json.dumps({"package": str(output), **asdict(inventory)}))
        return
    sizes = sorted(inventory.sizes.items(), key=lambda item: -item[1])
    Console().print(size_table(f"{output}: {inventory.platform}, {len(inventory.files)} files", "part", sizes))
    for line in (
        f"{kernels_sentence(inventory.row_kernels)}.",
        f"Licences of all {len(inventory.licences)} components are in {output / 'licences'}.",
        f"Next: {copy_command(PLATFORMS[platform], str(output))}",
        f"{output / NAME} says how to make a bundle, chat, serve and measure on the device.",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
