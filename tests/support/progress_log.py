"""What an export or a download reports."""

from __future__ import annotations


class ProgressLog:
    """A Progress that records everything: steps with their totals, the bytes done of each, sentences."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int | None]] = []
        self.done: list[int] = []
        self.messages: list[str] = []

    def step(self, title: str, total_bytes: int | None) -> None:
        self.steps.append((title, total_bytes))
        self.done.append(0)

    def advance(self, done_bytes: int) -> None:
        self.done[-1] += done_bytes

    def note(self, sentence: str) -> None:
        self.messages.append(sentence)


class Failing(ProgressLog):
    """Fails with this error where the step of that number begins, counted from 1."""

    def __init__(self, number: int, error: BaseException) -> None:
        super().__init__()
        self._number, self._error = number, error

    def step(self, title: str, total_bytes: int | None) -> None:
        super().step(title, total_bytes)
        if len(self.steps) == self._number:
            raise self._error
