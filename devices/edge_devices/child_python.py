"""How a child process of this Python is started, so that nothing in the current folder is taken for a module."""

from __future__ import annotations

import sys


def module_command(name: str, *arguments: str) -> tuple[str, ...]:
    """Returns the command that runs a module with these arguments.

    `python -m` alone looks into the current folder before the standard library, and that folder may hold a stranger's files: a bundle,
    a checkpoint. `-P` leaves it out (docs.python.org/3/using/cmdline.html).
    """
    return sys.executable, "-P", "-m", name, *arguments
