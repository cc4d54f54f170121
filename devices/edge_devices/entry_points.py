"""The entry points of the four commands.

After Ctrl-C, or if output cannot be written, they end without a traceback. The commands' modules are imported only inside `run`, because
the import takes a good part of a second, and Ctrl-C may come during it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

# OpenBLAS's threads wait 2 ** this number of cycles for work before they sleep. With the default of 26, each keeps a processor busy after
# the import of numpy, while a command starts.
_BLAS_WAITING = "10"
# The threshold of garbage collection. A start makes about 200,000 objects that stay alive; with Python's default of 700, they would be
# searched for garbage again and again, in vain.
_NEW_VALUES = 20_000
_NO_MEMORY = "there is not enough memory to start; close other programs, or raise the limit (ulimit -v)"


def _command(module: str, name: str) -> Callable[[], NoReturn]:
    def start() -> NoReturn:
        run(module, name)

    return start


edge_devices = _command("edge_devices.cli", "edge-devices")
edge_run = _command("edge_runtime.cli.run", "edge-run")
edge_bench = _command("edge_bench.cli.main", "edge-bench")
# For device packages, which contain only the measuring part of edge-bench.
edge_bench_on_device = _command("edge_bench.measure.command", "edge-bench")
edge_export = _command("edge_export.cli.command", "edge-export")


def run(module: str, name: str) -> NoReturn:
    """Runs the command `main` of a module, and ends the process with its exit code."""
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", _BLAS_WAITING)
    import gc

    gc.set_threshold(_NEW_VALUES)
    try:
        _try_numpy_first()
        code = _call(module, name)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        _ignore_interrupts()
        from edge_devices.errors import INTERRUPTED, tell_interrupted

        tell_interrupted()
        code = INTERRUPTED
    except MemoryError:  # also raised while modules are imported
        code = _print_error(_NO_MEMORY)
    except OSError as error:
        code = _failed(error)
    _ignore_interrupts()
    sys.exit(code)


def _ignore_interrupts() -> None:
    """Ignores Ctrl-C at the end of a command, where it could only cause a traceback."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)


class NumpyTrial:
    """An import hook that lets a fork of this process import numpy first.

    This is needed because OpenBLAS ends the process, by exit or SIGINT, if it cannot get memory. Raises MemoryError if the fork ends with
    an error.
    """

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        """Always returns None, so that the other finders look for the module."""
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
    """If the address space is limited (ulimit -v), a fork tries numpy before it is imported, and OpenBLAS gets only one thread."""
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
        # The output is still buffered. `run` flushes it, so that an error is reported there and not while the interpreter shuts down.
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return code if isinstance(code, int) else 0


def _failed(error: OSError) -> int:
    """Reports the errors that are not a command's own.

    These are a standard output that cannot be written, where nothing is printed if its reader closed the pipe, and a working directory that
    no longer exists. Returns the exit code. Raises any other error again.
    """
    import errno

    if error.filename is None and error.errno in (errno.ENOSPC, errno.EPIPE):  # an error of any other file has a file name
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards what is still buffered
        return 1 if error.errno == errno.EPIPE else _print_error(f"standard output cannot be written ({error.strerror})")
    try:
        os.getcwd()  # noqa: PTH109 - pathlib is not loaded yet
    except FileNotFoundError:
        return _print_error("the working directory no longer exists; change to one that does")
    raise error


def _print_error(sentence: str) -> int:
    """Prints an error and returns the exit code."""
    print(f"Error: {sentence}", file=sys.stderr)
    return 1
