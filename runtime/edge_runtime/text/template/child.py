"""A chat template in a limited child: compiled once there, rendered with the variables of each message."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from edge_devices.children.frames import receive, send
from edge_devices.children.limited import limit_step
from edge_runtime.text.template.sandbox import FAILURES, compile_template

MEMORY_BYTES = 256 << 20
STEP_SECONDS = 5.0
DONE, REFUSED = b"D", b"R"
MAX_REASON = 300


def prepare(_setup: bytes) -> None:
    """The host only loads jinja2; a template is compiled in its child."""


def serve(_shared: None, connection: socket.socket) -> None:
    """Compiles the template of the first message and renders it with the JSON of the others."""
    source = receive(connection).decode("utf-8", "surrogatepass")
    render = _answered(connection, lambda: compile_template(source), lambda _: "")
    while render is not None:
        limit_step(0)
        _answered(connection, partial(_rendered, render, receive(connection)), str)


def _rendered(render: Callable[[dict[str, Any]], str], message: bytes) -> str:
    return render(json.loads(message))


def _answered(connection: socket.socket, work: Callable[[], Any], text: Callable[[Any], str]) -> Any:
    limit_step(STEP_SECONDS)
    try:
        result = work()
        answer = DONE + text(result).encode("utf-8", "surrogatepass")
    except FAILURES as error:
        result, answer = None, REFUSED + reason(error).encode("utf-8", "replace")
    send(connection, answer)
    return result


def reason(error: Exception) -> str:
    """Returns an error as one line of limited length."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(error).split())[:MAX_REASON] or type(error).__name__
