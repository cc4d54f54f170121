"""`edge-run serve`: OpenAI's, Anthropic's and Ollama's APIs and a chat page over HTTP."""

from __future__ import annotations

from pathlib import Path

import click

from edge_devices.command_line import PanelCommand, takes
from edge_runtime.cli.options import BundlePath, Opening, note, opens_bundle, refuse_threads
from edge_runtime.cli.prompts import hub_bundle
from edge_runtime.server.options import ServeOptions
from edge_runtime.session.monitor import MonitorOptions

USUAL = (
    *("host", "port", "sessions", "api_key", "allow_origin", "waiting"),
    *("draft_length", "backend", "threads", "context", "memory_limit", "log"),
)


@click.command(cls=PanelCommand, usual=USUAL)
@click.argument("bundle", type=BundlePath())
@takes("options", ServeOptions)
@opens_bundle("image_rows", prompt_cache=True)
@takes("monitoring", MonitorOptions)
def serve(bundle: Path, options: ServeOptions, opening: Opening, monitoring: MonitorOptions) -> None:
    """Serve OpenAI's, Anthropic's and Ollama's APIs and a chat page over HTTP."""
    from edge_runtime.server.serve import serve as run_server

    refuse_threads(opening.load.threads)
    run_server(hub_bundle(bundle), options, opening.options(monitoring), note, opening.energy.shared_watch())
