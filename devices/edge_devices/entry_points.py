"""Where the four commands begin. What holds for all of them from the first moment on: how Ctrl-C ends them, and an output that is full.

The commands' own modules are named here, not imported: that takes a good part of a second, in which Ctrl-C must not end in a traceback.
"""

from __future__ import annotations

import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from _typeshed import ReadableBuffer

STOPPED = 130


def edge_devices() -> NoReturn:
    """Runs `edge-devices`."""
    run("edge_devices.cli", "edge-devices")


def edge_run() -> NoReturn:
    """Runs `edge-run`."""
    run("edge_runtime.cli.run", "edge-run")


def edge_bench() -> NoReturn:
    """Runs `edge-bench`."""
    run("edge_runtime.bench.cli", "edge-bench")


def edge_export() -> NoReturn:
    """Runs `edge-export`."""
    run("edge_export.cli.start", "edge-export")


class Output(io.FileIO):
    """Standard output that remembers its fault: none of the libraries that write to it says which file an error is of."""

    fault: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        """Writes, and remembers."""
        try:
            return super().write(data)
        except OSError as error:
            self.fault = error
            raise


def run(module: str, name: str) -> NoReturn:
    """Runs the command `main` of a module and ends the process with its exit code."""
    output = _watched_output()
    try:
        code = _call(module, name)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        code = STOPPED
    except OSError:
        if output is not None and output.fault is not None:
            code = _after_fault(output.fault)
        elif _is_nowhere():
            code = _say("the working directory is there no more; change to one that is")
        else:
            raise
    sys.exit(code)


def _watched_output() -> Output | None:
    """Puts an `Output` under sys.stdout; None where that is closed, or no file (a console of Windows)."""
    old = sys.stdout
    if not isinstance(old, io.TextIOWrapper) or type(getattr(old.buffer, "raw", old.buffer)) is not io.FileIO:
        return None
    output = Output(old.fileno(), "w", closefd=False)
    buffer: Any = output if old.write_through else io.BufferedWriter(output)
    sys.stdout = io.TextIOWrapper(
        buffer, encoding=old.encoding, errors=old.errors, line_buffering=old.line_buffering, write_through=old.write_through
    )
    return output


def _call(module: str, name: str) -> int:
    from importlib import import_module

    import click

    try:
        answer: Any = import_module(module).main(prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort as error:  # what click makes of Ctrl-C
        raise KeyboardInterrupt from error
    except SystemExit as end:
        # The output is not written yet: where it cannot be, that is for `run` to say, not for the interpreter's last moments.
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return answer if isinstance(answer, int) else 0


def _after_fault(fault: OSError) -> int:
    """Returns the exit code, once it is said what was wrong."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where goes what is not written yet
    if isinstance(fault, BrokenPipeError):  # a reader that has seen enough is no fault
        return 1
    return _say(f"standard output cannot be written ({fault.strerror})")


def _is_nowhere() -> bool:
    from pathlib import Path

    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _say(sentence: str) -> int:
    print(f"Error: {sentence}", file=sys.stderr)
    return 1
