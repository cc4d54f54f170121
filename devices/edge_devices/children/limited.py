"""The limits of a child, set in the child: `python -P -m edge_devices.children.limited LIMITS MODULE ARGUMENTS...` runs a module so.

Windows has none of them: there the parent's time limit holds, and each library's own.
"""

from __future__ import annotations

import contextlib
import json
import math
import runpy
import signal
import sys

from edge_devices.children.commands import Limits

_PR_SET_PDEATHSIG = 1


_limited = False


def limit_step(seconds: float) -> None:
    """Ends this process, if it is a limited one, when it needs more processor time than this until the next call; 0 ends the limit."""
    if _limited:
        signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_process(limits: Limits) -> None:
    """Limits this process for good; a child also leaves no dump of its memory behind."""
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
