"""ASGI middleware around all others: a line for the operator about each request, and an id of it for its client."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, MutableMapping
from typing import Any

from edge_runtime.server.http.guard import App, Message, Receive, Send

# Where the scope of a request has the list of what the line says of it beside method, path, status and time.
REMARKS = "edge_mtp.remarks"
_ID = b"x-request-id"
_SENT_ID = re.compile(rb"[!-~]{1,128}")
_SHOWN = 100  # characters of a path
_NO_ANSWER = 499


class AccessLog:
    """Passes requests on to `app`; `write` gets a line when one has ended. The line has no text of a prompt or of an answer."""

    def __init__(self, app: App, write: Callable[[str], None]) -> None:
        self._app = app
        self._write = write

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Adds the header x-request-id to the response: the client's own, if it sent one."""
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
                message = {**message, "headers": [*message["headers"], (_ID, identity)]}
            await send(message)

        try:
            await self._app({**scope, REMARKS: remarks}, receive, identified)
        finally:
            path = repr(scope["path"][:_SHOWN])[1:-1]  # without control characters, which a terminal would obey
            line = f"{scope['method']} {path} {status} in {time.perf_counter() - begin:.2f} s"
            with contextlib.suppress(OSError, ValueError):  # the terminal is gone, which ends no request
                self._write(": ".join([line, ", ".join(remarks)] if remarks else [line]))
