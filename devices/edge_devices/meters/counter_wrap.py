"""Undoing the wrap of a register."""

from __future__ import annotations

from edge_devices.errors import MeterError


class Unwrapped:
    """Turns a register that restarts at 0 after `span` (in its own units) into a number that never decreases.

    Exact while it is read at least once per wrap. Without a span, a decrease is an error: the source was reset.
    """

    def __init__(self, name: str, span: int | None) -> None:
        self._name = name
        self._span = span
        self._last: int | None = None
        self._turns = 0

    def total(self, register: int) -> int:
        """Takes a reading of the register; returns the number without wraps. Raises MeterError for an impossible reading."""
        if register < 0 or (self._span is not None and register > self._span):
            raise MeterError(f"{self._name} reads {register}, outside 0..{self._span}; the meter cannot be trusted")
        if self._last is not None and register < self._last:
            if self._span is None:
                raise MeterError(f"{self._name} went back from {self._last} to {register}: it was reset; measure again")
            self._turns += 1
        self._last = register
        return register + self._turns * (self._span or 0)
