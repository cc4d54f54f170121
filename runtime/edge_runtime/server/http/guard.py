"""ASGI middleware around the routes: refuses other websites, Host names and requests without the API key, and logs each request."""

from __future__ import annotations

import contextlib
import difflib
import hmac
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

from edge_runtime.server.errors import ApiError, ErrorForm, form_for

# Clients that are configured for llama-server, by host and port alone, leave the prefix out. Not /completions: there that is another API.
_BARE = re.compile(r"/(chat/completions|responses)(/input_tokens)?|/messages(/count_tokens)?|/models(/.*)?|/embeddings", re.DOTALL)
_PREFIX = "/v1"
_HEALTH = "/health"


def canonical(path: str) -> str:
    """Returns the path that a request means: without a slash at its end, and with the prefix of OpenAI's API."""
    path = re.sub("/{2,}", "/", path).rstrip("/") or "/"
    if _BARE.fullmatch(path):
        return _PREFIX + path
    return _HEALTH if path == _PREFIX + _HEALTH else path


def nearest(path: str, known: Collection[str]) -> str:
    """Returns what to do about a path that does not exist: the nearest one there is, or where to look."""
    near = difflib.get_close_matches(path[:200], known, n=1)
    return f"did you mean {near[0]}?" if near else "see GET /v1/models"


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
# Of `origins`: the websites that this machine serves, at any port.
THIS_MACHINE = "localhost"
# The page asks the user for the key, and health checks have none.
OPEN_PATHS = frozenset({"/", "/health"})
# Where the scope of an allowed request has the place of its key among all keys.
CLIENT = "edge_mtp.client"


# What scripts of allowed websites may send; the headers of a preflight are repeated. Nothing is deleted here, but a script that tries
# gets this server's sentence, not its browser's.
_METHODS = "GET, POST, DELETE, OPTIONS"
_PREFLIGHT_SECONDS = 600
_HOST = re.compile(r"(\[(?P<ipv6>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(:[0-9]*)?")
_SEVERAL_ORIGINS = ApiError(403, "the request has several Origin headers; send one", code="wrong_origin")


class Guard:
    """Passes allowed requests on to `app`, by the paths that it knows.

    Starlette's TrustedHostMiddleware and CORSMiddleware do not answer in the API's error format, so they are not used.

    `hosts` None accepts any Host header; without `keys` none is required. `origins` are the websites (scheme://host:port) whose scripts may
    use the server; "*" is all of them, "localhost" those of this machine, at any port.
    """

    def __init__(self, app: App, *, hosts: frozenset[str] | None, keys: Sequence[str] = (), origins: Collection[str] = ()) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        permission = self._permission(headers)
        origins = sum(name.lower() == b"origin" for name, _ in scope["headers"])
        path = canonical(scope["path"])
        preflight = bool(permission) and scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        refusal = self._refusal(path, headers, preflight) if origins < 2 else _SEVERAL_ORIGINS
        sends = _adding(send, permission) if permission else send
        if refusal is not None:
            await send_error(sends, refusal, form_for(path))
        elif preflight:
            await _permit(sends, headers)
        else:
            client = self._client(headers) or 0
            await self._app({**scope, "path": path, CLIENT: client}, receive, sends)

    def _permission(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Returns the headers that let a script of an allowed website read the response."""
        origin = headers.get("origin", "")
        allowed = {"*", origin.lower()} & self._origins or (THIS_MACHINE in self._origins and _is_local(origin))
        if not origin or not allowed:
            return {}
        return {"access-control-allow-origin": origin, "vary": "Origin"}

    def _refusal(self, path: str, headers: Mapping[str, str], preflight: bool) -> ApiError | None:
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        if "upgrade" in headers.get("connection", "").lower() and headers.get("upgrade", "").lower() == "websocket":
            return ApiError(400, "this server has no websockets; send plain HTTP requests", code="no_websocket")
        # DNS rebinding: a website whose name resolves to this address still sends its own name.
        if self._hosts is not None and host_name(host) not in self._hosts:
            return ApiError(
                403,
                f"the Host header {host[:80]!r} is no name of this server; use the address that it prints, or --allow-host",
                code="wrong_host",
            )
        # Browsers send a script's origin; scripts of other websites must not use this server.
        if origin is not None and origin.lower().partition("://")[2] != host and not self._permission(headers):
            return ApiError(
                403,
                f"requests from {origin[:80]!r} are refused; allow that website with --allow-origin when you start the server",
                code="wrong_origin",
            )
        if self._keys and not preflight and path not in OPEN_PATHS and self._client(headers) is None:
            return ApiError(
                401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'", code="invalid_api_key"
            )
        return None

    def _client(self, headers: Mapping[str, str]) -> int | None:
        """Returns the place of the key that was sent, in OpenAI's header or in Anthropic's; None for another.

        The time does not depend on which it is.
        """
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        sent = [headers.get("x-api-key", ""), bearer if scheme.lower() == "bearer" else ""]
        same = [[hmac.compare_digest(text.strip().encode("latin-1"), key) for text in sent] for key in self._keys]
        return next((place for place, equal in enumerate(same) if any(equal)), None)


def _is_local(origin: str) -> bool:
    scheme, _, host = origin.lower().partition("://")
    return scheme in ("http", "https") and host_name(host) in LOOPBACK_NAMES


def host_name(host: str) -> str:
    """Returns a Host header without port and brackets; nothing if it is malformed."""
    parts = _HOST.fullmatch(host)
    return (parts["ipv6"] or parts["name"] or "") if parts else ""


async def send_error(send: Send, error: ApiError, form: ErrorForm) -> None:
    """Sends an error as a complete response."""
    body = json.dumps(error.body(form)).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close", **error.headers}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    await _send_whole(send, error.status, headers, body)


async def _permit(send: Send, headers: Mapping[str, str]) -> None:
    """Answers a preflight request of an allowed website."""
    requested = headers.get("access-control-request-headers", "")[:1000]
    allowed = {"access-control-allow-methods": _METHODS, "access-control-max-age": str(_PREFLIGHT_SECONDS)}
    if requested:
        allowed["access-control-allow-headers"] = requested
    await _send_whole(send, 200, allowed, b"")


async def _send_whole(send: Send, status: int, headers: Mapping[str, str], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": _pairs(headers)})
    await send({"type": "http.response.body", "body": body})


def _adding(send: Send, headers: Mapping[str, str]) -> Send:
    async def adding(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *_pairs(headers)]}
        await send(message)

    return adding


def _pairs(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


# Where the scope of a request has the list of what the line says of it beside method, path, status and time.
REMARKS = "edge_mtp.remarks"
_ID = b"x-request-id"
_ID_OF_ANTHROPIC = b"request-id"
_SENT_ID = re.compile(rb"[!-~]{1,128}")
_SHOWN = 100  # characters of a path
_NO_ANSWER = 499


class AccessLog:
    """Passes requests on to `app`; `write` gets a line when one has ended. The line has no text of a prompt or of an answer."""

    def __init__(self, app: App, write: Callable[[str], None]) -> None:
        self._app = app
        self._write = write

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Adds the id to the response under both names that clients read: their own, if they sent one as x-request-id."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status, remarks = time.perf_counter(), _NO_ANSWER, []  # type: float, int, list[str]
        sent = next((value for name, value in scope["headers"] if name.lower() == _ID and _SENT_ID.fullmatch(value)), None)
        identity = sent or f"req_{secrets.token_hex(16)}".encode()

        async def identified(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (_ID, identity), (_ID_OF_ANTHROPIC, identity)]}
            await send(message)

        try:
            await self._app({**scope, REMARKS: remarks}, receive, identified)
        finally:
            path = repr(scope["path"][:_SHOWN])[1:-1]  # without control characters, which a terminal would obey
            line = f"{scope['method']} {path} {status} in {time.perf_counter() - begin:.2f} s"
            with contextlib.suppress(OSError, ValueError):  # the terminal is gone, which ends no request
                self._write(": ".join([line, ", ".join(remarks)] if remarks else [line]))
