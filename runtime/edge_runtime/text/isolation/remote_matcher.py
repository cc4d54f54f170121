"""A matcher of llguidance in a limited child, with the methods of llguidance's own that the constraint uses."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from edge_runtime.text.isolation import matcher_host as host
from edge_runtime.text.isolation.process import Child, ChildError, Host

_MEGABYTES = host.MEMORY_BYTES >> 20
_TOO_MUCH = f"compiling it takes more than {host.COMPILE_SECONDS:g} s of processor time or {_MEGABYTES} MB; simplify it"
_STEP_TOO_MUCH = f"a step of it takes more than {host.STEP_SECONDS:g} s of processor time, or all of it {_MEGABYTES} MB; simplify it"


class RemoteMatcher:
    """Implements `matcher_host.Matcher`."""

    def __init__(self, processes: Host, grammar: str) -> None:
        self._child: Child = processes.new_child()
        self._error = ""
        self._stopped = False
        self._ask(host.COMPILE, grammar.encode("utf-8", "replace"), _TOO_MUCH)

    def is_error(self) -> bool:
        """Whether a call failed."""
        return bool(self._error)

    def get_error(self) -> str:
        """The reason, empty without an error."""
        return self._error

    def is_stopped(self) -> bool:
        """Whether no text can follow."""
        return self._stopped

    def is_accepting(self) -> bool:
        """Whether the text could end here."""
        return bool(self._ask(host.ACCEPTING)[0])

    def compute_bitmask(self) -> bytes:
        """One bit per token: whether it may follow."""
        return self._ask(host.MASK)[1]

    def compute_ff_bytes(self) -> bytes:
        """The bytes that must follow."""
        return self._ask(host.FORCED)[1]

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        """How many of the tokens, from the first, may follow."""
        return self._ask(host.VALIDATE, _packed(tokens))[0]

    def consume_tokens(self, tokens: Sequence[int]) -> bool:
        """Adds tokens; an invalid one is an error."""
        return bool(self._ask(host.CONSUME, _packed(tokens))[0])

    def rollback(self, count: int) -> bool:
        """Removes the newest tokens."""
        return bool(self._ask(host.ROLL_BACK, _packed([count]))[0])

    def _ask(self, operation: int, body: bytes = b"", otherwise: str = _STEP_TOO_MUCH) -> tuple[int, bytes]:
        if self._error:
            return 0, b""
        try:
            answer = self._child.ask(bytes([operation]) + body)
            flags, number = host.ANSWER.unpack_from(answer)
            data = answer[host.ANSWER.size :]
        except (ChildError, struct.error):
            self._error, self._stopped = otherwise, True
            return 0, b""
        self._stopped = bool(flags & host.STOPPED)
        if flags & host.FAILED:
            self._error = data.decode("utf-8", "replace") or "the library failed"
            self._child.close()
            return 0, b""
        return number, data


def _packed(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)
