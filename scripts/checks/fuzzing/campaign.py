"""Runs a reader on many inputs in a child process and checks for foreign errors, signals, hangs, memory, opened files and code that is run.

A child that dies or hangs is replaced, and the campaign continues after the input that caused it. Mutations are our own, so that it runs
wherever Linux does.
"""

from __future__ import annotations

import codecs
import json
import mmap
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import tracemalloc
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_devices.files.user_cache import CACHE_VARIABLE
from fuzzing.mutation import input_of
from fuzzing.readers import Opened, Reader

HANG_SECONDS = 10.0
_POLL_SECONDS = 0.01
# Memory of the interpreter for an exception with its traceback, a compiled pattern, a decoder.
SLACK_BYTES = 4 << 20
_ROOM_BYTES = 4 << 30
# Tracing memory makes a reader several times slower, so only one in this many inputs is traced.
_TRACED = 20
_PER_CHILD = 20_000
_MAX_FAILURES = 50
_MAX_MESSAGE = 2000
# Encodings that json.loads tries on bytes, and those of tables; imported before the audit hook, which forbids running code.
_ENCODINGS = ("utf_16", "utf_16_le", "utf_16_be", "utf_32", "utf_32_le", "utf_32_be", "utf_8_sig", "cp1252", "idna")
_FORBIDDEN = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pickle.find_class", "socket.connect", "exec")
_PATH_EVENTS = ("open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate")


# Where a desktop's machine facts name its Vulkan drivers (edge_devices.machine.detection).
_DRIVER_LISTS = ("/etc/vulkan/", "/usr/share/vulkan/", "/usr/local/share/vulkan/")


class ForbiddenError(BaseException):
    """Raised by the audit hook. A BaseException, so that `except Exception` does not catch it."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An input that failed a check."""

    number: int
    kind: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """Results of a campaign. `read` inputs were accepted, `refused` ones raised an error of the package. `slowest_ms` is processor time."""

    reader: str
    inputs: int
    seed: int
    read: int
    refused: int
    seconds: float
    slowest_ms: float
    failures: tuple[Failure, ...]


class _Shared:
    """Numbers shared by parent and children: the current input, and counts."""

    NAMES = ("number", "read", "refused", "slowest_ns")

    def __init__(self) -> None:
        self._cells = memoryview(mmap.mmap(-1, 8 * len(self.NAMES))).cast("q")

    def __getitem__(self, name: str) -> int:
        return self._cells[self.NAMES.index(name)]

    def __setitem__(self, name: str, value: int) -> None:
        self._cells[self.NAMES.index(name)] = value


def run_campaign(reader: Reader, inputs: int, seed: int, bundle: Path | None = None, *, first: int = 0) -> Report:
    """Runs so many inputs of a seed, from number `first` on; stops after _MAX_FAILURES failures."""
    shared, failures, begin = _Shared(), [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        folder = Path(name)
        opened = reader.open(folder / "work", bundle)
        failures_file = folder / "failures.jsonl"
        failures_file.touch()
        number, end = first, first + inputs
        while number < end and len(failures) < _MAX_FAILURES:
            last = min(number + _PER_CHILD, end)
            shared["number"] = number
            child = os.fork()
            if child == 0:
                _child(opened, range(number, last), seed, shared, failures_file)
            ended = _watch(child, shared)
            if ended is not None:
                failures.append(Failure(number=shared["number"], kind=ended[0], what=ended[1]))
                number = shared["number"] + 1
            else:
                number = last
            failures += [Failure(**json.loads(line)) for line in failures_file.read_text().splitlines()]
            failures_file.write_text("")
            if any(failure.kind == "campaign" for failure in failures):
                break
    return Report(
        reader=reader.name,
        inputs=number - first,
        seed=seed,
        read=shared["read"],
        refused=shared["refused"],
        seconds=round(time.monotonic() - begin, 1),
        slowest_ms=round(shared["slowest_ns"] / 1e6, 1),
        failures=tuple(failures),
    )


def make_input(opened: Opened, seed: int, number: int) -> bytes:
    """Returns input `number` of a campaign."""
    reader = opened.reader
    return input_of(opened.seeds, seed, number, structured=reader.structured, focus=opened.focus, by_meaning=reader.by_meaning)


def _watch(child: int, shared: _Shared) -> tuple[str, str] | None:
    """Waits for a child; returns the kind of failure and a description, or None. Time while this process is stopped does not count."""
    number, polls = -1, 0
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return None if code == 0 else ("crash", f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")
        number, polls = shared["number"], polls + 1 if shared["number"] == number else 0
        if polls * _POLL_SECONDS > HANG_SECONDS:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hang", f"no answer in {HANG_SECONDS:g} s"
        time.sleep(_POLL_SECONDS)


def _child(opened: Opened, numbers: range, seed: int, shared: _Shared, failures_file: Path) -> None:
    """Never returns."""
    code = 1
    try:
        _quiet()
        os.environ[CACHE_VARIABLE] = str(opened.folder / "cache")
        warnings.simplefilter("ignore")  # printing one opens the source file
        read_corpus(opened)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + _ROOM_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        guard = Guard(opened.folder)
        with failures_file.open("a") as log:
            for number in numbers:
                data = make_input(opened, seed, number)
                shared["number"] = number
                failure = _try_input(opened, data, number, guard, shared)
                if failure is not None:
                    log.write(json.dumps({"number": number, "kind": failure[0], "what": failure[1]}) + "\n")
                    log.flush()
        code = 0
    except BaseException:  # noqa: BLE001 - the parent reads it from the log
        with failures_file.open("a") as log:
            log.write(json.dumps({"number": shared["number"], "kind": "campaign", "what": traceback.format_exc()[-600:]}) + "\n")
    finally:
        os._exit(code)


def _try_input(opened: Opened, data: bytes, number: int, guard: Guard, shared: _Shared) -> tuple[str, str] | None:
    traced = number % _TRACED == 0
    if traced:
        tracemalloc.start()
    guard.on = opened.reader.guarded
    begin = time.process_time_ns()
    outcome = outcome_of(opened, data)
    guard.on = False
    shared["slowest_ns"] = max(shared["slowest_ns"], time.process_time_ns() - begin)
    if traced:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if peak > opened.reader.memory_factor * (len(data) + opened.beside) + SLACK_BYTES:
            return "memory", f"{peak} bytes for an input of {len(data)}"
    if outcome in ("read", "refused"):
        shared[outcome] += 1
        return None
    return "error", outcome


def read_corpus(opened: Opened) -> None:
    """Reads the corpus: imports, encodings and compiled patterns are cached before the guard is installed."""
    for name in _ENCODINGS:
        codecs.lookup(name)
    for data in opened.seeds:
        if (outcome := outcome_of(opened, data)) != "read":
            raise RuntimeError(f"an input of the corpus of {len(data)} bytes is not read: {outcome}")


def outcome_of(opened: Opened, data: bytes) -> str:
    """Returns "read", "refused", or what was wrong."""
    try:
        opened.read(data)
    except opened.reader.errors as error:
        return "refused" if _is_sentence(str(error)) else f"no sentence: {str(error)[:200]!r} ({len(str(error))} characters)"
    except BaseException as error:  # noqa: BLE001 - a campaign must find every error, including panics of Rust code
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        return f"{type(error).__name__}: {str(error)[:200]} ({Path(frame.f_code.co_filename).name}:{line})"
    return "read"


def _is_sentence(text: str) -> bool:
    """Returns whether a message is one line of limited length without control characters."""
    return 0 < len(text) <= _MAX_MESSAGE and text.isprintable()


class Guard:
    """An audit hook that, while `on`, forbids opening files outside a folder and running code."""

    def __init__(self, folder: Path) -> None:
        self.on = False
        self._folder = str(folder.resolve())
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in _FORBIDDEN:
            self.on = False
            raise ForbiddenError(f"{event} {arguments!r}"[:200])
        if event in _PATH_EVENTS and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.fsdecode(arguments[0])
            if not os.path.realpath(path).startswith(self._folder) and not path.startswith(
                ("/proc/", "/sys/", "/dev/null", sys.prefix, sys.base_prefix, *_DRIVER_LISTS)
            ):
                self.on = False
                raise ForbiddenError(f"{event} {path!r}"[:200])


def _quiet() -> None:
    """Discards standard output and error, to which C libraries print their errors."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
