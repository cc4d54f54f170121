"""The start of `edge-export`: one sentence instead of a traceback where the packages that an export needs are not installed."""

from __future__ import annotations

from typing import Any

import click

INSTALL = "pip install 'edge-mtp[export]' (or [export-onnx], without llama.cpp)"


def main(**options: Any) -> Any:
    """Runs the command, with options of click's."""
    try:
        from edge_export.cli.command import main as command

        return command(**options)
    except ModuleNotFoundError as error:
        if (error.name or "edge_export").partition(".")[0].startswith("edge_"):
            raise
        click.echo(f"Error: edge-export needs {error.name}, which is not installed; run: {INSTALL}", err=True)
        raise SystemExit(1) from error
