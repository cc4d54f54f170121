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
            notify(f"Before measuring {what}, {before.words()}: what is measured now is used once and not kept.")
        self._watch = LoadWatch()

    def passed(self) -> bool:
        """Returns whether the measurement may be kept. Says so if other programs disturbed it, unless that was said before."""
        if self.was_busy:
            return False
        load = self._watch.load()
        if load.is_busy:
            self._notify(f"While {self._what} were measured, {load.words()}: they are used once and not kept.")
        return not load.is_busy
