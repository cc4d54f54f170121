"""How a child process of this Python is started, so that nothing in the current folder is taken for a module, and how it answers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from edge_devices.errors import EdgeError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the system allows a child, where it can: address space with all libraries, processor time, and whether it writes files."""

    memory_bytes: int | None = None
    cpu_seconds: float | None = None
    writes_files: bool = True


def module_command(name: str, *arguments: str) -> tuple[str, ...]:
    """Returns the command that runs a module with these arguments.

    `python -m` alone looks into the current folder before the standard library, and that folder may hold a stranger's files: a bundle,
    a checkpoint. `-P` leaves it out (docs.python.org/3/using/cmdline.html).
    """
    return sys.executable, "-P", "-m", name, *arguments


def limited_command(name: str, *arguments: str, limits: Limits | None = None) -> tuple[str, ...]:
    """Returns the command that runs a module within limits. On Linux the child also ends with the process that started it."""
    return module_command("edge_devices.children.limited", json.dumps(asdict(limits or Limits())), name, *arguments)


def print_answer(work: Callable[[], Mapping[str, object]]) -> None:
    """In a child: prints what `work` returns, as `ChildEnd.answer` reads it; of an error {"error": a sentence}, with exit code 1."""
    try:
        answer = work()
    except (EdgeError, MemoryError) as error:
        print(json.dumps({"error": str(error) if isinstance(error, EdgeError) else "there is not enough memory"}))
        raise SystemExit(1) from error
    print(json.dumps(answer))


def import_paths() -> dict[str, str]:
    """Returns the environment in which a child imports the same packages as this process, wherever they lie."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
