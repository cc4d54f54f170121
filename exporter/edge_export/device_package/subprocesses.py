"""Runs the programs that fetch and build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from edge_export.errors import PackageError


def found(program: str, advice: str) -> str:
    """Returns the path of a program. Raises PackageError, ending in `advice`, if it is not installed."""
    # pip installs programs beside Python, whose folder need not be in PATH.
    path = shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))
    if path is None:
        raise PackageError(f"{program}, which building the package needs, is missing; {advice}")
    return path


def run(command: Sequence[str | Path], advice: str, *, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Returns what a program writes to standard output. Raises PackageError, with its last line and `advice`, if it fails."""
    try:
        done = subprocess.run(
            [str(word) for word in command],
            cwd=folder,
            env=os.environ | (environment or {}),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise PackageError(f"{command[0]} does not start ({error.strerror}); {advice}") from error
    if done.returncode:
        raise PackageError(f"{_short(command)} failed ({_reason(done.stderr, done.stdout)}); {advice}")
    return done.stdout


def _short(command: Sequence[str | Path]) -> str:
    """The program and its first argument that is not an option, which identify the step."""
    words = [str(word) for word in command[1:] if not str(word).startswith("-") and "/" not in str(word)]
    return " ".join([Path(command[0]).name, *words[:2]])


def _reason(*outputs: str) -> str:
    """The first line that contains an error, or the last line."""
    for text in outputs:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith(("error", "e:", "fatal")) or " error: " in line]
        if errors or lines:
            return (errors or lines[-1:])[0][:300]
    return "it said nothing"
