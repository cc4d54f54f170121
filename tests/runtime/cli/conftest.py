"""The commands over scripted sessions: what they open and which meters they find is replaced here alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from edge_devices.meters.base import Finding
from edge_runtime.cli import options as cli_options
from edge_runtime.cli.run import main
from edge_runtime.session.load_options import LoadOptions
from edge_runtime.session.session import Session

Opens = Callable[[LoadOptions], Session]


class Command:
    """`edge-run`, which opens what `opens` makes of its options in place of a bundle."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.opened: list[LoadOptions] = []

    def opens(self, make: Opens) -> None:
        """Has the next commands open what `make` returns, or end with what it raises."""

        def open_session(_: object, options: LoadOptions) -> Session:
            self.opened.append(options)
            return make(options)

        self._patch.setattr(cli_options, "open_session", open_session)

    def finds(self, findings: list[Finding]) -> None:
        """Has the next commands find these meters."""
        self._patch.setattr(cli_options, "find_meters", lambda _: findings)

    def __call__(self, *words: object, stdin: str | bytes | None = None, **options: Any) -> Result:
        """Runs the command with these words."""
        return CliRunner().invoke(main, [*map(str, words)], input=stdin, prog_name="edge-run", **options)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(monkeypatch)
