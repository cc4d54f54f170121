"""A progress that hears nothing."""

from __future__ import annotations


class Silent:
    """Implements edge_export.pipeline.export.Progress."""

    def step(self, title: str, total_bytes: int | None) -> None: ...

    def advance(self, done_bytes: int) -> None: ...

    def say(self, sentence: str) -> None: ...
