"""A matcher of llguidance in a limited child, with the methods of llguidance's own that the constraint uses."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from edge_devices.children.forked import Child, ChildError, Host
from edge_runtime.text import matcher_child

_MEGABYTES = matcher_child.MEMORY_BYTES >> 20
_TOO_MUCH = f"compiling it takes more than {matcher_child.COMPILE_SECONDS:g} s of processor time or {_MEGABYTES} MB; simplify it"
_STEP_TOO_MUCH = (
    f"a step of it takes more than {matcher_child.STEP_SECONDS:g} s of processor time, or all of it {_MEGABYTES} MB; simplify it"
)


class RemoteMatcher:
    """Implements `matcher_child.Matcher`."""

    def __init__(self, processes: Host, grammar: str) -> None:
        self._child: Child = processes.new_child()
        self._error = ""
        self._stopped = False
        self._ask(matcher_child.COMPILE, grammar.encode("utf-8", "replace"), _TOO_MUCH)

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
        return bool(self._ask(matcher_child.ACCEPTING)[0])

    def compute_bitmask(self) -> bytes:
        """One bit per token: whether it may follow."""
        return self._ask(matcher_child.MASK)[1]

    def compute_ff_bytes(self) -> bytes:
        """The bytes that must follow."""
        return self._ask(matcher_child.FORCED)[1]

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        """How many of the tokens, from the first, may follow."""
        return self._ask(matcher_child.VALIDATE, _packed(tokens))[0]

    def consume_tokens(self, tokens: Sequence[int]) -> bool:
        """Adds tokens; an invalid one is an error."""
        return bool(self._ask(matcher_child.CONSUME, _packed(tokens))[0])

    def rollback(self, count: int) -> bool:
        """Removes the newest tokens."""
        return bool(self._ask(matcher_child.ROLL_BACK, _packed([count]))[0])

    def _ask(self, operation: int, body: bytes = b"", otherwise: str = _STEP_TOO_MUCH) -> tuple[int, bytes]:
        if self._error:
            return 0, b""
        try:
            answer = self._child.ask(bytes([operation]) + body)
            flags, number = matcher_child.ANSWER.unpack_from(answer)
            data = answer[matcher_child.ANSWER.size :]
        except (ChildError, struct.error):
            self._error, self._stopped = otherwise, True
            return 0, b""
        self._stopped = bool(flags & matcher_child.STOPPED)
        if flags & matcher_child.FAILED:
            self._error = data.decode("utf-8", "replace") or "the library failed"
            self._child.close()
            return 0, b""
        return number, data


def _packed(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)
