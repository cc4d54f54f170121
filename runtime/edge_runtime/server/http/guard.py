"""ASGI middleware that refuses other websites, other Host names and requests without the API key.

Starlette's TrustedHostMiddleware does not answer in the API's error format, so it is not used.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from edge_runtime.server.errors import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
# The page asks the user for the key, and health checks have none.
OPEN_PATHS = frozenset({"/", "/health"})


class Guard:
    """Passes allowed requests on to `app`. `hosts` None accepts any Host header; `key` None requires no key."""

    def __init__(self, app: App, *, hosts: frozenset[str] | None, key: str | None) -> None:
        self._app = app
        self._hosts = hosts
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Responds to refused requests itself."""
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope["path"], headers)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await send_error(send, refusal)

    def _refusal(self, path: str, headers: Mapping[str, str]) -> ApiError | None:
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        # DNS rebinding: a website whose name resolves to this address still sends its own name.
        if self._hosts is not None and host_name(host) not in self._hosts:
            return ApiError(
                403, f"the Host header {host[:80]!r} is not a name of this server; use the address that it prints", code="wrong_host"
            )
        # Browsers send a script's origin; scripts of other websites must not use this server.
        if origin is not None and origin.lower().partition("://")[2] != host:
            return ApiError(403, f"requests from {origin[:80]!r} are refused; only this server's own page may call it", code="wrong_origin")
        if self._key is not None and path not in OPEN_PATHS and not self._has_key(headers.get("authorization", "")):
            return ApiError(401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'", code="invalid_api_key")
        return None

    def _has_key(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._key or b"")


def host_name(host: str) -> str:
    """Returns a Host header without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


async def send_error(send: Send, error: ApiError) -> None:
    """Sends an error as a complete response."""
    body = json.dumps(error.to_json()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close", **error.headers}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    pairs = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
