"""Children with limits: how a child of this Python is started, and the limits that it sets itself before it runs a module.

`python -P -m edge_devices.children.limited LIMITS MODULE ARGUMENTS...` runs a module so.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import runpy
import signal
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


_PR_SET_PDEATHSIG = 1
_limited = False


def limit_step(seconds: float) -> None:
    """Ends this process, if it is a limited one, when it needs more processor time than this until the next call; 0 ends the limit."""
    if _limited:
        signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_process(limits: Limits) -> None:
    """Limits this process for good; a child also leaves no dump of its memory behind.

    Windows has no such limits: there the parent's time limit holds, and each library's own.
    """
    global _limited
    try:
        import resource
    except ImportError:
        return
    _limited = True
    kinds: dict[int, int | None] = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: None if limits.writes_files else 0,
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_CPU: None if limits.cpu_seconds is None else math.ceil(limits.cpu_seconds),
    }
    for kind, limit in kinds.items():
        if limit is not None:
            with contextlib.suppress(OSError, ValueError):  # the user's own limit may be lower
                resource.setrlimit(kind, (limit, limit))


def end_with_parent() -> None:
    """On Linux, ends this process when the thread that started it does (prctl(2), PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def main() -> None:
    """Runs the module of the command line."""
    limits, module = Limits(**json.loads(sys.argv[1])), sys.argv[2]
    end_with_parent()
    limit_process(limits)
    del sys.argv[:2]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
