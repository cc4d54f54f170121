"""Whether a measurement on first use may be believed: other programs were quiet right before it and while it ran."""

from __future__ import annotations

from collections.abc import Callable

from edge_devices.machine.load import LoadWatch, load_now


class QuietCheck:
    """Looks at the load for a moment, and from then on. `what` is measured, such as "the costs of drafts"."""

    def __init__(self, what: str, notify: Callable[[str], None]) -> None:
        """`notify` gets a sentence if the machine is busy now."""
        self._what, self._notify = what, notify
        before = load_now()
        self.was_busy = before.is_busy
        if self.was_busy:
            notify(f"This machine is busy, so what is measured on first use is used once and not kept ({before.words()}).")
        self._watch = LoadWatch()

    def passed(self) -> bool:
        """Returns whether the measurement may be kept. Says so if other programs disturbed it, unless that was said before."""
        if self.was_busy:
            return False
        load = self._watch.load()
        if load.is_busy:
            self._notify(f"Other programs disturbed the measurement of {self._what}, which are used once and not kept ({load.words()}).")
        return not load.is_busy


def said_once(notify: Callable[[str], None]) -> Callable[[str], None]:
    """Returns `notify` without sentences that were said before, or that differ from such a one by what is in brackets at the end."""
    said: set[str] = set()

    def notify_once(sentence: str) -> None:
        head = sentence.partition(" (")[0] if sentence.endswith(").") else sentence
        if head not in said:
            said.add(head)
            notify(sentence)

    return notify_once
