"""The options of `edge-run serve`, except those of opening a bundle: where it listens, and who may use it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from edge_devices.option_fields import option
from edge_runtime.errors import RequestError

KEY_VARIABLE = "EDGE_MTP_API_KEY"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.\-]*://[^/\s]+/?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where to listen, and who may use the server. Raises RequestError for an invalid key or origin. `port` 0 takes a free port."""

    host: str = option(default="127.0.0.1", panel="Server", help="Address to listen on; 0.0.0.0 is all addresses.")
    port: int = option(default=8080, low=0, high=65535, panel="Server", help="Port to listen on; 0 is any free port.")
    sessions: int = option(default=1, low=1, high=32, panel="Server", help="Number of concurrent requests, each with its own context.")
    deterministic: bool = option(
        default=False,
        panel="Server",
        help="Answers depend on their request alone, whatever else runs; where logits are not exact, one request runs at a time.",
    )
    waiting: int = option(default=16, low=0, panel="Server", help="Number of requests that may wait; further ones get status 503.")
    max_tokens: int | None = option(
        default=None,
        low=1,
        metavar="TOKENS",
        panel="Server",
        help="Most tokens of an answer, whatever a request asks for.  [default: as the context allows]",
    )
    idle_unload: float | None = option(
        default=None,
        low=1,
        metavar="SECONDS",
        panel="Server",
        help="Free the model after so long without a request; the next one loads it again.  [default: never]",
    )
    api_key: Sequence[str] = option(
        default=(),
        metavar="KEY",
        envvar=KEY_VARIABLE,
        show_envvar=True,
        panel="Server",
        help="API key that clients must send. Repeatable: clients with different keys share no cached prompts.",
    )
    allow_origin: Sequence[str] = option(
        default=(),
        metavar="ORIGIN",
        panel="Server",
        help="Website whose scripts may use the server; localhost allows those of this machine, at any port, * all. Repeatable.",
    )
    allow_host: Sequence[str] = option(
        default=(), metavar="NAME", panel="Server", help="Another name under which clients reach the server, such as a proxy's. Repeatable."
    )

    def __post_init__(self) -> None:
        if not all(key.isascii() and key.split() == [key] for key in self.api_key):
            raise RequestError("--api-key is empty, not ASCII or has blanks; give a key, such as one from 'openssl rand -hex 16'")
        for origin in self.allow_origin:
            if origin not in ("*", "localhost") and not _ORIGIN.fullmatch(origin):
                raise RequestError(
                    f"--allow-origin {origin!r} is no origin; write scheme and host, such as https://chat.example, or localhost, or *"
                )
