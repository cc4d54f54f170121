"""Renders a chat template in a child process with limits.

A template from outside may loop forever, or double a text until memory runs out. The child's limits then end it, even inside C code. This
module has both ends of the messages; only the child loads jinja2.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from edge_devices.children import limit_step
from edge_devices.fork_host import Child, ChildError, Host, receive, send
from edge_runtime.errors import BackendError

MEMORY_BYTES = 256 << 20
STEP_SECONDS = 5.0
MAX_REASON = 300
_DONE, _REFUSED = b"D", b"R"
_lock = threading.Lock()


class TemplateError(Exception):
    """A template does not compile, refuses its variables, or exceeds a limit. The text is the reason."""


@cache
def _host() -> Host:
    return Host(__name__, b"", BackendError)


class Renderer:
    """A compiled template. Compiling it may take `seconds` of processor time, and so may each rendering.

    Raises TemplateError if it does not compile, BackendError if no process can be started.
    """

    def __init__(self, source: str, seconds: float = STEP_SECONDS) -> None:
        self._seconds = seconds
        self._setup = json.dumps({"source": source, "seconds": seconds}).encode()
        self._idle = [self._new_child()]  # grows to the number of threads that render at the same time

    def render(self, variables: dict[str, Any]) -> str:
        """Returns the text for variables that are plain JSON values. Raises TemplateError. Any thread may call it."""
        try:
            message = json.dumps(variables).encode()
        except (ValueError, RecursionError) as error:
            raise TemplateError(f"the conversation is not JSON: {error}") from None
        try:
            child = self._idle.pop()
        except IndexError:
            child = self._new_child()
        answer = self._asked(child, message)
        self._idle.append(child)  # not reached with a child that has ended
        return _text_of(answer)

    def _new_child(self) -> Child:
        with _lock:
            host = _host()
        child = host.new_child()
        _text_of(self._asked(child, self._setup))
        return child

    def _asked(self, child: Child, message: bytes) -> bytes:
        try:
            return child.ask(message)
        except ChildError:
            raise TemplateError(f"it takes more than {self._seconds:g} s of processor time or {MEMORY_BYTES >> 20} MB") from None


def _text_of(answer: bytes) -> str:
    if answer[:1] != _DONE:
        raise TemplateError(answer[1:].decode("utf-8", "replace"))
    return answer[1:].decode("utf-8", "surrogatepass")


def prepare(_setup: bytes) -> ModuleType:
    """Returns the module that compiles templates. Each template is compiled in its own child."""
    from edge_runtime.text import template_environment

    return template_environment


def serve(environment: Any, connection: socket.socket) -> None:
    """Compiles the template of the first message and renders it with the JSON of the others."""
    setup = json.loads(receive(connection))
    source, seconds = setup["source"], setup["seconds"]
    render = _answered(connection, seconds, lambda: environment.compile_template(source), lambda _: "")
    while render is not None:
        limit_step(0)
        message = receive(connection)
        _answered(connection, seconds, lambda: render(json.loads(message)), str)  # noqa: B023 - called at once


def _answered(connection: socket.socket, seconds: float, work: Callable[[], Any], text: Callable[[Any], str]) -> Any:
    """Runs `work` and sends the text of its result, or the reason why it failed. Returns the result."""
    limit_step(seconds)
    try:
        result = work()
        answer = _DONE + text(result).encode("utf-8", "surrogatepass")
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        result, answer = None, _REFUSED + _reason(error).encode("utf-8", "replace")
    send(connection, answer)
    return result


def _reason(error: Exception) -> str:
    """Returns an error as one line of limited length."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return f"it takes more than {MEMORY_BYTES >> 20} MB"
    return " ".join(str(error).split())[:MAX_REASON] or type(error).__name__
