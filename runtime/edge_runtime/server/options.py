"""The options of `edge-run serve BUNDLE`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import click

from edge_devices.command_line import option_group, take

KEY_VARIABLE = "EDGE_MTP_API_KEY"
# The options that --serve accepts; the others belong to a single prompt, or are fields of each request.
_SHARED = frozenset(
    [
        "bundle",
        "backend",
        "execution_provider",
        "keep_packed",
        "draft_length",
        "policy",
        "drafter",
        "threads",
        "context",
        "config",
        "preset",
        "log",
        "warn_rejection",
        "meter",
        "objective",
        "slowdown",
        "phase_power",
        "check",
        "verify_key",
        "serve",
        "host",
        "kv_type",
        "memory_limit",
        "draft_store",
        "draft_store_size",
        "remember",
        "port",
        "sessions",
        "deterministic",
        "waiting",
        "api_key",
        "allow_origin",
        "allow_host",
    ]
)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.\-]*://[^/\s]+/?", re.IGNORECASE)
serve_options = option_group(
    click.option("--serve", is_flag=True, help="Serve the OpenAI API and a chat page over HTTP instead of generating."),
    click.option("--host", default="127.0.0.1", help="Serve: address to listen on; 0.0.0.0 is all addresses."),
    click.option("--port", type=click.IntRange(0, 65535), default=8080, help="Serve: port to listen on; 0 is any free port."),
    click.option(
        "--sessions", type=click.IntRange(1, 32), default=1, help="Serve: number of concurrent requests, each with its own context."
    ),
    click.option(
        "--deterministic",
        is_flag=True,
        help="Serve: answers depend on their request alone, whatever else runs; where rows are not exact, one request runs at a time.",
    ),
    click.option(
        "--waiting", type=click.IntRange(min=0), default=16, help="Serve: number of requests that may wait; further ones get status 503."
    ),
    click.option("--api-key", envvar=KEY_VARIABLE, show_envvar=True, help="Serve: API key that clients must send."),
    click.option(
        "--allow-origin", multiple=True, metavar="ORIGIN", help="Serve: website whose scripts may use the server; repeatable; * is all."
    ),
    click.option("--allow-host", multiple=True, metavar="NAME", help="Serve: further name in the Host header, as of a proxy; repeatable."),
    panel="Server",
)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Values of `serve_options`: where to listen, and for whom. `port` 0 takes a free one."""

    host: str
    port: int
    sessions: int
    waiting: int
    api_key: str | None
    allow_origin: tuple[str, ...] = ()
    allow_host: tuple[str, ...] = ()
    deterministic: bool = False
    serve: bool = True


def serve_values(values: dict[str, Any]) -> ServeOptions | None:
    """Takes the options' values; returns None without --serve. Raises a usage error for options that contradict each other."""
    context = click.get_current_context()
    given = {name for name in context.params if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE}
    options = take(values, ServeOptions)
    if not options.serve:
        if unfit := given & set(vars(options)):
            raise click.UsageError(f"{_written(context, unfit)}: for a server only; add --serve, or leave it out")
        return None
    if unfit := given - _SHARED:
        raise click.UsageError(f"{_written(context, unfit)}: not with --serve; each request sets it")
    if options.api_key is not None and not (options.api_key.strip() and options.api_key.isascii()):
        raise click.UsageError("--api-key is empty or not ASCII; give a key, such as one from 'openssl rand -hex 16'")
    for origin in options.allow_origin:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise click.UsageError(f"--allow-origin {origin!r} is no origin; write scheme and host, such as https://chat.example, or *")
    return options


def _written(context: click.Context, names: set[str]) -> str:
    """Returns parameters as written on the command line: PROMPT, --max-tokens."""
    parameters = [parameter for parameter in context.command.params if parameter.name in names]
    return ", ".join(one.opts[0] if isinstance(one, click.Option) else one.make_metavar(context) for one in parameters)
