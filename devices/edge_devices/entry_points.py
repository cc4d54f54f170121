"""The entry points of the four commands: Ctrl-C and an output that cannot be written end each of them without a traceback.

The commands' modules are imported only inside `run`: the import takes a good part of a second, and Ctrl-C may come during it.
"""

from __future__ import annotations

import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from _typeshed import ReadableBuffer

STOPPED = 130
# OpenBLAS's threads wait 2 ** so many cycles for work before they sleep. With its own 26 each keeps a processor busy from numpy's import
# on, while a command starts.
_BLAS_WAITING = "10"
# A start makes some 200,000 values that stay: at Python's own 700 they are looked through again and again for garbage, in vain.
_NEW_VALUES = 20_000
_NO_MEMORY = "there is not enough memory to start; close other programs, or raise the limit (ulimit -v)"


def _command(module: str, name: str) -> Callable[[], NoReturn]:
    def start() -> NoReturn:
        run(module, name)

    return start


edge_devices = _command("edge_devices.cli", "edge-devices")
edge_run = _command("edge_runtime.cli.run", "edge-run")
edge_bench = _command("edge_bench.cli.main", "edge-bench")
# Of a device package, which has the part that measures alone.
edge_bench_on_device = _command("edge_bench.measure.command", "edge-bench")
edge_export = _command("edge_export.cli.start", "edge-export")


class StandardOutput(io.FileIO):
    """Standard output that keeps its write error: the OSError that reaches `run` does not name the file."""

    error: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        """Writes, and keeps an error."""
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def run(module: str, name: str) -> NoReturn:
    """Runs the command `main` of a module and ends the process with its exit code."""
    output = None
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", _BLAS_WAITING)
    import gc

    gc.set_threshold(_NEW_VALUES)
    try:
        output = _replace_output()
        _try_numpy_first()
        code = _call(module, name)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        _ignore_interrupts()
        print("stopped", file=sys.stderr)
        code = STOPPED
    except MemoryError:  # also while modules load
        code = _print_error(_NO_MEMORY)
    except OSError:
        if output is not None and output.error is not None:
            code = _output_failed(output.error)
        elif _folder_is_gone():
            code = _print_error("the working directory no longer exists; change to one that does")
        else:
            raise
    _ignore_interrupts()
    sys.exit(code)


def _ignore_interrupts() -> None:
    """From here on Ctrl-C could only put a traceback behind the end of the command."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _replace_output() -> StandardOutput | None:
    """Puts a `StandardOutput` under sys.stdout; returns None where stdout is closed or no file (a Windows console)."""
    old = sys.stdout
    if not isinstance(old, io.TextIOWrapper) or type(getattr(old.buffer, "raw", old.buffer)) is not io.FileIO:
        return None
    output = StandardOutput(old.fileno(), "w", closefd=False)
    buffer: Any = output if old.write_through else io.BufferedWriter(output)
    sys.stdout = io.TextIOWrapper(
        buffer, encoding=old.encoding, errors=old.errors, line_buffering=old.line_buffering, write_through=old.write_through
    )
    return output


class NumpyTrial:
    """An import hook: before numpy is imported, a fork of this process does it. Raises MemoryError if that ends badly.

    Where its OpenBLAS gets no memory, it ends the process itself, by exit or by SIGINT.
    """

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        """Finds nothing: the other finders do."""
        if name != "numpy":
            return
        sys.meta_path.remove(self)
        if (child := os.fork()) == 0:
            _import_numpy_and_exit()
        if os.waitpid(child, 0)[1] != 0:
            raise MemoryError


def _import_numpy_and_exit() -> NoReturn:
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        import numpy  # noqa: F401

        code = 0
    finally:
        os._exit(code)


def _try_numpy_first() -> None:
    """Where a process may map only so much (ulimit -v), numpy is tried before it is imported, and its OpenBLAS gets one thread."""
    if not hasattr(os, "fork"):
        return
    import resource

    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        sys.meta_path.insert(0, NumpyTrial())


def _call(module: str, name: str) -> int:
    from importlib import import_module

    import click

    try:
        code: Any = import_module(module).main(prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort as error:  # click turns Ctrl-C into this
        raise KeyboardInterrupt from error
    except SystemExit as end:
        # The output is still buffered: `run` flushes it, so that an error is reported there and not while the interpreter shuts down.
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return code if isinstance(code, int) else 0


def _output_failed(error: OSError) -> int:
    """Prints what went wrong, unless the reader closed the pipe. Returns the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards what is still buffered
    if isinstance(error, BrokenPipeError):
        return 1
    return _print_error(f"standard output cannot be written ({error.strerror})")


def _folder_is_gone() -> bool:
    from pathlib import Path

    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _print_error(sentence: str) -> int:
    """Returns the exit code."""
    print(f"Error: {sentence}", file=sys.stderr)
    return 1
