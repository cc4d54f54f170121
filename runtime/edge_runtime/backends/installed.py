"""Version and features of the installed backends, from a child process: a build that does not suit the processor dies on loading."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from edge_devices.children.limited import limited_command, print_answer
from edge_devices.children.running import run_child
from edge_runtime.backends.selection import BackendKind, load_backend
from edge_runtime.errors import BackendError

CHILD_COMMAND = limited_command("edge_runtime.backends.installed")
TIMEOUT_SECONDS = 60.0


def ask_backend(
    kind: BackendKind, child_command: Sequence[str] = CHILD_COMMAND, timeout_seconds: float = TIMEOUT_SECONDS
) -> dict[str, Any]:
    """Returns what a backend describes of its library (`interface.Backend.describe`), or {"error": a sentence} if it cannot be used.

    Raises BackendError if no child process can be started.
    """
    child = run_child([*child_command, kind], seconds=timeout_seconds, failure=BackendError)
    if isinstance(child.answer.get("error"), str):
        return {"error": child.answer["error"]}
    if child.end is not None or "version" not in child.answer:
        return {"error": f"its library {child.end or 'gave no answer'} when it was loaded"}
    return child.answer


if __name__ == "__main__":
    print_answer(lambda: load_backend(sys.argv[1]).describe())
