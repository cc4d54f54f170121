"""Child processes with limits, for hostile input and for libraries that may crash.

`run_child` runs a command with limits on time and output. It returns a result however the child ends, with a sentence about that. Limits on
memory, processor time and files are set by the child itself: `python -P -m edge_devices.children LIMITS MODULE ARGUMENTS...` sets them and
then runs a module. `limited_command` returns that command.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from edge_devices.errors import DeviceError, EdgeError, errors_as

MAX_OUTPUT_BYTES = 16 << 20
_PIECE = 1 << 16
_POLL_SECONDS = 0.05
_INTERRUPT_SECONDS = 0.25  # how long a child may take to end by itself after Ctrl-C, which it gets too
_GROUP_SECONDS = 5.0  # how long a process group may take to end by itself after SIGTERM
_PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that the system enforces, if it can: address space including libraries, processor time, and whether files may be written."""

    memory_bytes: int | None = None
    cpu_seconds: float | None = None
    writes_files: bool = True


def module_command(name: str, *arguments: str) -> tuple[str, ...]:
    """Returns the command that runs a module with these arguments.

    `python -m` alone searches the current folder before the standard library, and that folder may contain files from a stranger, such as a
    bundle or a checkpoint. `-P` excludes it (docs.python.org/3/using/cmdline.html).
    """
    return sys.executable, "-P", "-m", name, *arguments


def limited_command(name: str, *arguments: str, limits: Limits | None = None) -> tuple[str, ...]:
    """Returns the command that runs a module within limits. On Linux, the child also ends when the process that started it ends."""
    return module_command("edge_devices.children", json.dumps(asdict(limits or Limits())), name, *arguments)


def import_paths() -> dict[str, str]:
    """Returns the environment with which a child imports the same packages as this process."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class ChildBudget:
    """Processor time that several children use, one after another. Any thread may cancel it, which ends the child."""

    def __init__(self, cpu_seconds: float = math.inf) -> None:
        self._left = cpu_seconds
        self._cancelled = threading.Event()

    @property
    def cpu_seconds_left(self) -> float:
        """The most processor time that the next child may use."""
        return max(0.0, self._left)

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ends the child that runs, and prevents further ones from being started."""
        self._cancelled.set()

    def spend(self, cpu_seconds: float) -> None:
        """Subtracts the processor time that a child used."""
        self._left -= cpu_seconds


@dataclass(frozen=True, kw_only=True)
class ChildEnd:
    """How a child ended, and what it wrote.

    Each output has at most the allowed number of bytes. `code` is the exit code, or minus the signal's number. `end` is None after exit
    code 0, else the predicate of a sentence, such as "died of SIGSEGV". `late` means that it was ended because it took too long, `cut`
    because it wrote too much. `cancelled` means that its budget was cancelled, or that it was never started.
    """

    code: int
    output: bytes = b""
    errors: bytes = b""
    end: str | None = None
    late: bool = False
    cut: bool = False
    cancelled: bool = False

    @property
    def answer(self) -> dict[str, object]:
        """The JSON object in the last line of the output, if the child ended by itself; empty if there is none."""
        lines = self.output.decode("utf-8", "replace").strip().splitlines()
        try:
            data = json.loads(lines[-1]) if lines and self.code >= 0 else None
        except (ValueError, RecursionError):
            return {}
        return data if isinstance(data, dict) else {}

    @property
    def reason(self) -> str:
        """The line that says what failed: the first error line, else the last line, of standard error, else of the output. Or empty."""
        for data in (self.errors, self.output):
            lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
            failures = [line for line in lines if _is_error(line)]
            if lines:
                return (failures or lines[-1:])[0].removeprefix("Error: ")[:500]
        return ""


def run_child(
    command: Sequence[str | Path],
    stdin: bytes = b"",
    *,
    seconds: float = math.inf,
    output_bytes: int = MAX_OUTPUT_BYTES,
    environment: Mapping[str, str] | None = None,
    budget: ChildBudget | None = None,
    with_children: bool = False,
    each_poll: Callable[[], None] = lambda: None,
    failure: type[EdgeError] = DeviceError,
) -> ChildEnd:
    """Runs a command with `stdin` as its standard input, and returns how it ended.

    `environment` is added to this process's variables. The child is ended if it takes more than `seconds`, if it writes more than
    `output_bytes` to one of its outputs, or if its budget is cancelled. It is not started if nothing is left of the budget. `each_poll` is
    called while it runs, and may raise. With `with_children`, its own children, such as a build tool's compilers, are ended with it, first
    by SIGTERM. Raises `failure` if the child cannot be started.
    """
    budget = budget or ChildBudget()
    if budget.cancelled or not budget.cpu_seconds_left:
        return ChildEnd(code=-signal.SIGTERM, end="was not started, as nothing is left of its budget", cancelled=True)
    pipe = subprocess.PIPE
    # Without this variable, ggml starts a debugger on the dying child to print its stack (ggml/src/ggml.c).
    variables = {**os.environ, "GGML_NO_BACKTRACE": "1", **(environment or {})}
    words = [str(word) for word in command]
    with errors_as(failure, "a child process could not be started", f"check that {command[0]} can be run"):
        group = 0 if with_children and os.name == "posix" else None
        process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, env=variables, process_group=group)
    run = _Run(process, output_bytes, budget, seconds, leads_group=group is not None)
    try:
        run.begin(stdin)
        while not run.is_over():
            each_poll()
    except KeyboardInterrupt:
        run.wait(_INTERRUPT_SECONDS)
        raise
    finally:
        run.end()
    each_poll()
    return run.result()


def signal_name(number: int) -> str:
    """Returns a signal's name, such as "SIGSEGV" for 11; "signal N" if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class _Run:
    """One running child. Only the thread that made this object waits for the process and ends it."""

    def __init__(
        self, process: subprocess.Popen[bytes], output_bytes: int, budget: ChildBudget, seconds: float, *, leads_group: bool
    ) -> None:
        self._leads_group = leads_group
        self._process, self._budget, self._seconds, self._output_bytes = process, budget, seconds, output_bytes
        self._start = time.monotonic()
        self._readers = [_Reader(pipe, output_bytes) for pipe in (process.stdout, process.stderr) if pipe is not None]
        self._late = self._cancelled = False

    def begin(self, stdin: bytes) -> None:
        """Starts the threads that serve the child's pipes. Raises MemoryError if the system cannot start one."""
        feeder = threading.Thread(target=_feed, args=(self._process.stdin, stdin), daemon=True)
        pipes = dict(zip((feeder, *self._readers), (self._process.stdin, self._process.stdout, self._process.stderr), strict=True))
        while pipes:
            try:
                next(iter(pipes)).start()
            except RuntimeError as error:  # "can't start new thread", for example because memory is missing
                for pipe in pipes.values():  # no thread owns these
                    if pipe is not None:
                        pipe.close()
                raise MemoryError(str(error)) from error
            del pipes[next(iter(pipes))]

    def is_over(self) -> bool:
        """Waits a moment. Returns whether the child and its outputs have ended, or whether the child must be ended."""
        reading = next((reader for reader in self._readers if reader.is_alive()), None)
        if reading is not None:
            reading.join(_POLL_SECONDS)
        elif self.wait(_POLL_SECONDS):
            return True
        self._cancelled, self._late = self._budget.cancelled, time.monotonic() - self._start > self._seconds
        return self._cut or self._cancelled or self._late

    def wait(self, seconds: float) -> bool:
        """Waits for the process. Returns whether it ended within this time."""
        end = time.monotonic() + seconds
        while not self._reaped():
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True

    def end(self) -> None:
        """Ends the process if it still runs."""
        if not self._reaped():
            if self._leads_group:
                self._end_group()
            self._process.kill()
            self.wait(math.inf)
        for reader in self._readers:
            reader.may_close.set()

    def _end_group(self) -> None:
        """Ends the process and what it started. First by SIGTERM, because ninja's compilers have their own groups, which ninja must end."""
        end = time.monotonic() + _GROUP_SECONDS
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGTERM)
            while time.monotonic() < end:
                self._reaped()
                os.killpg(self._process.pid, 0)
                time.sleep(0.01)
            os.killpg(self._process.pid, signal.SIGKILL)

    def result(self) -> ChildEnd:
        code = self._process.returncode
        if self._cut:
            end = f"wrote more than {self._output_bytes} bytes"
        elif self._cancelled:
            end = "was cancelled"
        elif self._late:
            end = f"gave no answer in {self._seconds:g} seconds"
        elif code < 0:
            end = f"died of {signal_name(-code)}"
        else:
            end = f"ended with exit code {code}" if code else ""
        output, errors = (bytes(reader.kept[: self._output_bytes]) for reader in self._readers)
        late = self._late and not (self._cut or self._cancelled)
        return ChildEnd(code=code, output=output, errors=errors, end=end or None, late=late, cut=self._cut, cancelled=self._cancelled)

    @property
    def _cut(self) -> bool:
        return any(reader.cut for reader in self._readers)

    def _reaped(self) -> bool:
        """Returns whether the process has ended. If so, subtracts its processor time, or the elapsed time if unknown, from the budget."""
        if self._process.returncode is not None:
            return True
        if hasattr(os, "wait4"):
            number, status, usage = os.wait4(self._process.pid, os.WNOHANG)
            if not number:
                return False
            self._process.returncode = os.waitstatus_to_exitcode(status)
            self._budget.spend(usage.ru_utime + usage.ru_stime)
        elif self._process.poll() is None:
            return False
        else:
            self._budget.spend(time.monotonic() - self._start)
        return True


class _Reader(threading.Thread):
    """Keeps what a child writes to a pipe, up to one piece beyond the limit.

    The thread owns the pipe, because a child of the child may keep the other end open longer than anybody waits.
    """

    def __init__(self, pipe: IO[bytes], output_bytes: int) -> None:
        super().__init__(daemon=True)
        self.kept, self.cut = bytearray(), False
        self.may_close = threading.Event()
        self._pipe, self._output_bytes = pipe, output_bytes

    def run(self) -> None:
        """Reads to the end or the limit."""
        with self._pipe:
            while piece := self._pipe.read(_PIECE):
                self.kept += piece
                if len(self.kept) > self._output_bytes:
                    self.cut = True
                    self.may_close.wait()  # until the process has ended, as a closed pipe might only end a child of it
                    return


def _feed(pipe: IO[bytes], data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), pipe:
        pipe.write(data)


def _is_error(line: str) -> bool:
    return line.lower().startswith(("error", "e:", "fatal")) or " error: " in line or "GGML_ASSERT" in line


# The rest runs in a child.

_limited = False


def limit_step(seconds: float) -> None:
    """In a limited process, ends it if it uses more processor time than this before the next call. 0 removes the limit."""
    if _limited:
        signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_process(limits: Limits) -> None:
    """Limits this process permanently. It also writes no core dump if it crashes.

    Windows has no such limits. There, only the parent's time limit and the libraries' own limits apply.
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
    """On Linux, makes the system end this process when the thread that started it ends."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def print_answer(work: Callable[[], Mapping[str, object]]) -> None:
    """In a child, prints the result of `work` for `ChildEnd.answer`. After an error, prints {"error": SENTENCE} and exits with code 1."""
    try:
        answer = work()
    except (EdgeError, MemoryError) as error:
        print(json.dumps({"error": str(error) if isinstance(error, EdgeError) else "there is not enough memory"}))
        raise SystemExit(1) from error
    print(json.dumps(answer))


def main() -> None:
    """Sets the limits and runs the module of the command line."""
    limits, module = Limits(**json.loads(sys.argv[1])), sys.argv[2]
    end_with_parent()
    limit_process(limits)
    del sys.argv[:2]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
