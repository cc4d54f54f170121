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

# Clients that are configured for llama-server, by host and port alone, omit the prefix. /completions is missing here, because it is
# another API in llama-server.
_BARE = re.compile(r"/(chat/completions|responses)(/input_tokens)?|/messages(/count_tokens)?|/models(/.*)?|/embeddings", re.DOTALL)
_PREFIX = "/v1"
_HEALTH = "/health"


def canonical(path: str) -> str:
    """Returns the path that a request means: without repeated or trailing slashes, and with the prefix of OpenAI's API."""
    path = re.sub("/{2,}", "/", path).rstrip("/") or "/"
    if _BARE.fullmatch(path):
        return _PREFIX + path
    return _HEALTH if path == _PREFIX + _HEALTH else path


def nearest(path: str, known: Collection[str]) -> str:
    """Returns advice about a path that does not exist: the most similar known path, or where to look."""
    near = difflib.get_close_matches(path[:200], known, n=1)
    return f"did you mean {near[0]}?" if near else "see GET /v1/models"


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
# A value of `origins` that stands for the websites of this machine, at any port.
THIS_MACHINE = "localhost"
# Paths that need no key: the page asks the user for it, and health checks have none.
OPEN_PATHS = frozenset({"/", "/health"})
# The name in an allowed request's ASGI scope that has the index of the client's key.
CLIENT = "edge_mtp.client"


# Methods that scripts of allowed websites may use; the headers that a preflight asks for are all allowed. No path takes DELETE, but a
# script that tries it gets this server's error message instead of its browser's.
_METHODS = "GET, POST, DELETE, OPTIONS"
_PREFLIGHT_SECONDS = 600
_HOST = re.compile(r"(\[(?P<ipv6>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(:[0-9]*)?")
_SEVERAL_ORIGINS = ApiError(403, "the request has several Origin headers; send one", code="wrong_origin")


class Guard:
    """Passes allowed requests on to `app`, with canonical paths.

    Starlette's TrustedHostMiddleware and CORSMiddleware do not answer in the API's error format, so they are not used.

    `hosts` None accepts any Host header. Without `keys`, no key is required. `origins` has the websites (scheme://host:port) whose scripts
    may use the server; "*" stands for all websites, "localhost" for those of this machine, at any port.
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
        """Returns the index of the key that was sent in OpenAI's or Anthropic's header; None if it is unknown.

        The comparison time does not depend on which key was sent, so it reveals nothing about the keys.
        """
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        sent = [headers.get("x-api-key", ""), bearer if scheme.lower() == "bearer" else ""]
        same = [[hmac.compare_digest(text.strip().encode("latin-1"), key) for text in sent] for key in self._keys]
        return next((place for place, equal in enumerate(same) if any(equal)), None)


def _is_local(origin: str) -> bool:
    scheme, _, host = origin.lower().partition("://")
    return scheme in ("http", "https") and host_name(host) in LOOPBACK_NAMES


def host_name(host: str) -> str:
    """Returns a Host header without port and brackets; an empty string if it is malformed."""
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


# The name in a request's ASGI scope that has a list of remarks for the log line, which also has method, path, status and time.
REMARKS = "edge_mtp.remarks"
_ID = b"x-request-id"
_ID_OF_ANTHROPIC = b"request-id"
_SENT_ID = re.compile(rb"[!-~]{1,128}")
_SHOWN = 100  # logged characters of a path
_NO_ANSWER = 499


class AccessLog:
    """Passes requests on to `app`; `write` gets a line when a request has ended. It never has text of a prompt or an answer."""

    def __init__(self, app: App, write: Callable[[str], None]) -> None:
        self._app = app
        self._write = write

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Adds a request id to the response, in both headers that clients read. It is the client's own x-request-id, if there is one."""
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
            with contextlib.suppress(OSError, ValueError):  # a closed terminal must not end the request
                self._write(": ".join([line, ", ".join(remarks)] if remarks else [line]))
