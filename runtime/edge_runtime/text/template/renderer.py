"""Renders a chat template in a limited child process; in this process where the system cannot fork.

The sandbox counts steps and sizes, but a comparison or a slice of long lists, or a parser, works behind its counter: there the child's
limits hold.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from edge_devices.children import forked
from edge_runtime.errors import BackendError

_CHILD = "edge_runtime.text.template.child"
_LIMITS = "it takes more than 5 s of processor time or 256 MB"
_lock = threading.Lock()


class TemplateError(Exception):
    """A template does not compile, refuses its variables, or exceeds a limit. The text is the reason."""


@cache
def _host() -> forked.Host:
    return forked.Host(_CHILD, b"", BackendError)


class Renderer:
    """A compiled template. Raises TemplateError if it does not compile, BackendError if no process can be started."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._child: forked.Child | None = None
        self._local: Callable[[dict[str, Any]], str] | None = None
        if forked.AVAILABLE:
            with self._lock:
                self._connect()
        else:
            self._local = _in_this_process(source)

    def render(self, variables: dict[str, Any]) -> str:
        """Returns the text for variables that are plain JSON values. Raises TemplateError. Any thread may call it."""
        if self._local is not None:
            return self._local(variables)
        try:
            message = json.dumps(variables).encode()
        except (ValueError, RecursionError) as error:
            raise TemplateError(f"the conversation is not JSON: {error}") from None
        with self._lock:
            return self._ask(self._child or self._connect(), message)

    def _connect(self) -> forked.Child:
        with _lock:
            host = _host()
        child = host.new_child()
        self._ask(child, self._source.encode("utf-8", "surrogatepass"))
        self._child = child
        return child

    def _ask(self, child: forked.Child, message: bytes) -> str:
        try:
            answer = child.ask(message)
        except forked.ChildError:
            self._child = None  # the next conversation gets a new one
            raise TemplateError(_LIMITS) from None
        if answer[:1] != b"D":
            raise TemplateError(answer[1:].decode("utf-8", "replace"))
        return answer[1:].decode("utf-8", "surrogatepass")


def _in_this_process(source: str) -> Callable[[dict[str, Any]], str]:
    from edge_runtime.text.template import child, sandbox

    def guarded(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except sandbox.FAILURES as error:
            raise TemplateError(child.reason(error)) from error

    render = guarded(lambda: sandbox.compile_template(source))

    def rendered(variables: dict[str, Any]) -> str:
        return str(guarded(lambda: render(variables)))

    return rendered
