"""Runs the programs that fetch and build."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from edge_devices.children import module_command, run_child
from edge_devices.waiting import Report
from edge_export.errors import PackageError

# Begins a step with this title; what it returns is told how far the step is.
Step = Callable[[str], Report]


def program_path(program: str, advice: str) -> str:
    """Returns the path of a program. Raises PackageError, ending in `advice`, if it is not installed."""
    # pip installs programs beside Python, whose folder need not be in PATH.
    path = shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))
    if path is None:
        raise PackageError(f"{program}, which building the package needs, is missing; {advice}")
    return path


def run(
    command: Sequence[str | Path],
    advice: str,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    each_poll: Callable[[], None] = lambda: None,
) -> str:
    """Returns what a program writes to standard output. Raises PackageError, with its last line and `advice`, if it fails.

    `each_poll` is called again and again while it runs.
    """
    done = run_child(command, environment=environment, folder=folder, with_children=True, each_poll=each_poll, failure=PackageError)
    if done.end:
        raise PackageError(f"{_short(command)} failed ({done.reason or done.end}); {advice}")
    return done.output.decode("utf-8", "replace")


def pip_download(folder: Path, *words: str) -> None:
    """Downloads what the words ask for, without dependencies, into a folder; pip checks the index's hashes. Raises PackageError."""
    command: list[str | Path] = [
        *module_command("pip"),
        "--disable-pip-version-check",
        "--quiet",
        "download",
        "--no-deps",
        "--dest",
        folder,
        *words,
    ]
    run(command, "check the network, and that pip is installed (python -m ensurepip)")


def _short(command: Sequence[str | Path]) -> str:
    """The program and its first argument that is not an option, which identify the step."""
    words = [str(word) for word in command[1:] if not str(word).startswith("-") and "/" not in str(word)]
    return " ".join([Path(command[0]).name, *words[:2]])
