"""The processors of this machine: which of them a process may use, what tells them from others, and whether other programs use them."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

# ggml aborts the process above this.
MAX_THREADS = 512
_SYSTEM = Path("/sys/devices/system/cpu")
# Relative speed for the scheduler (Linux, Documentation/scheduler/sched-capacity.rst); else the highest frequency.
_SPEEDS = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")
# Equal cores may differ a little in rated speed (favoured cores of desktop processors); clusters differ by more.
_SAME = 0.9


@cache
def processor_groups() -> list[list[int]]:
    """Returns the processors this process may run on, grouped by speed, the fastest first; read once per process."""
    return clusters(processor_numbers())


def processor_numbers() -> Collection[int]:
    """Returns the numbers of the processors this process may run on now."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def usable_processors() -> int:
    """Returns how many processors this process may run on."""
    return len(processor_numbers())


def clusters(processors: Iterable[int], root: Path = _SYSTEM) -> list[list[int]]:
    """Groups processors by speed, the fastest first; one group where they are alike or their speed is unknown."""
    speeds = {number: _speed(root / f"cpu{number}") for number in processors}
    ranked = sorted(speeds, key=lambda number: (-(speeds[number] or 0), number))
    if not ranked or None in speeds.values():
        return [sorted(speeds)]
    levels: dict[int, int] = {}
    level, top = 0, speeds[ranked[0]] or 0
    for number in ranked:
        speed = speeds[number] or 0
        if speed < _SAME * top:
            level, top = level + 1, speed
        levels[number] = level
    return [list(group) for _, group in groupby(ranked, key=levels.__getitem__)]


def fastest(count: int, groups: list[list[int]]) -> list[int]:
    """Returns the fewest of the fastest groups, as one list, that have room for `count` threads."""
    for size, chosen in zip(accumulate(map(len, groups)), accumulate(groups), strict=True):
        if size >= count:
            return chosen
    return [number for group in groups for number in group]


def keep_to_fastest(threads: int, groups: list[list[int]]) -> None:
    """Where cores differ, restricts this process to the fastest groups with room for `threads` threads."""
    if len(groups) > 1:
        stay_on(fastest(threads, groups))


def stay_on(processors: Iterable[int]) -> None:
    """Restricts all threads of this process, also later ones, to these processors; does nothing where the system has no affinity."""
    if not hasattr(os, "sched_setaffinity"):
        return
    mask = set(processors)
    threads = Path("/proc/self/task")
    for thread in [int(path.name) for path in threads.iterdir()] if threads.is_dir() else [0]:
        with contextlib.suppress(OSError):  # the thread has ended, or the processors are reserved
            os.sched_setaffinity(thread, mask)


def _speed(folder: Path) -> int | None:
    for name in _SPEEDS:
        with contextlib.suppress(OSError, ValueError):
            return int((folder / name).read_text(encoding="ascii"))
    return None


_CPU_FIELDS = {"model name", "flags", "Features", "CPU implementer", "CPU variant", "CPU part", "CPU revision"}


def cpu_identity() -> list[str]:
    """Returns the lines of /proc/cpuinfo that tell one CPU's instruction sets from another's."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return [platform.processor()]
    pairs = (line.partition(":") for line in lines)
    return sorted({f"{name.strip()}:{value.strip()}" for name, _, value in pairs if name.strip() in _CPU_FIELDS})


# How busy the processors are with other programs: the time that these used and this process did not, and how long programs waited.
#
# The kernel's pressure stall information (/proc/pressure/cpu, Documentation/accounting/psi.rst) counts the time in which a program that
# could run had no processor. It shows what the share of all processors hides: one busy program delays a team of as many threads as
# processors. The share shows what pressure hides: programs on processors that this one leaves free take memory bandwidth and clocks.

# If other programs use more than this share of the processors, figures are disturbed.
BUSY_SHARE = 0.15
# If programs wait for a processor in more than this share of the time, figures are disturbed. With as many threads as processors and
# nothing else running, it was 4 to 5 % (both backends, 2 cores of a Xeon "Emerald Rapids", 22 November 2026, pressure of a cgroup of its
# own).
BUSY_WAITING = 0.15
STAT, PRESSURE = Path("/proc/stat"), Path("/proc/pressure/cpu")
BEFORE_SECONDS = 0.25  # how long the load is looked at before a measurement
_SHORTEST_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class MachineLoad:
    """How busy other programs kept the machine for some seconds; None where the system does not say.

    `others`: the mean share of all processors that they used; `waiting`: the share of the time in which a program that could run waited for
    a processor.
    """

    others: float | None
    seconds: float
    waiting: float | None = None

    @property
    def is_busy(self) -> bool:
        """Whether other programs disturbed what was measured."""
        return (self.others or 0.0) > BUSY_SHARE or (self.waiting or 0.0) > BUSY_WAITING

    def words(self) -> str:
        """Returns what is known about the load, without advice."""
        parts = [f"other programs used {self.others:.0%} of the processors"] if self.others is not None else []
        if self.waiting is not None:
            parts.append(f"programs waited for a processor in {self.waiting:.0%} of the time")
        return " and ".join(parts) or "how busy the machine was is not known"

    def sentence(self) -> str:
        """Returns the load as one sentence, with advice if it disturbed."""
        return self.words() + ("; the figures are disturbed, close other programs and run again" if self.is_busy else "")

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"busy": self.is_busy}


def mean_load(loads: Sequence[MachineLoad]) -> MachineLoad:
    """Returns the mean of all loads, weighted by their seconds. Unknown parts are ignored."""

    def mean(values: Sequence[tuple[float | None, float]]) -> float | None:
        known = [(value, seconds) for value, seconds in values if value is not None]
        total = sum(seconds for _, seconds in known)
        return sum(value * seconds for value, seconds in known) / total if total else None

    return MachineLoad(
        others=mean([(load.others, load.seconds) for load in loads]),
        waiting=mean([(load.waiting, load.seconds) for load in loads]),
        seconds=sum(load.seconds for load in loads),
    )


def load_now() -> MachineLoad:
    """Waits BEFORE_SECONDS and returns the load during that time."""
    watch = LoadWatch()
    time.sleep(BEFORE_SECONDS)
    return watch.load()


@dataclass(frozen=True)
class _Reading:
    """The clock, busy seconds of all processors and seconds in which programs waited (None if unknown), and this process's seconds."""

    clock: float
    busy: float | None
    waited: float | None
    own: float


class LoadWatch:
    """Measures the load since its creation. It works only on Linux. Without PSI, only the share of other programs is known."""

    def __init__(self, stat: Path | None = None, pressure: Path | None = None) -> None:
        self._stat, self._pressure = stat or STAT, pressure or PRESSURE
        self._begin = self._read()

    def load(self) -> MachineLoad:
        """Returns the load until now. It is unknown if the span is too short for the system's clock ticks."""
        begin, end = self._begin, self._read()
        seconds = end.clock - begin.clock
        if seconds < _SHORTEST_SECONDS:
            return MachineLoad(others=None, seconds=seconds)
        others = waiting = None
        if begin.busy is not None and end.busy is not None:
            used = (end.busy - begin.busy) - (end.own - begin.own)
            others = min(1.0, max(0.0, used / (seconds * _processors(self._stat))))
        if begin.waited is not None and end.waited is not None:
            waiting = min(1.0, max(0.0, (end.waited - begin.waited) / seconds))
        return MachineLoad(others=others, seconds=seconds, waiting=waiting)

    def next(self) -> MachineLoad | None:
        """Returns the load since the last call that returned one; None if it is unknown, for example after too short a span."""
        load = self.load()
        if load.others is None and load.waiting is None:
            return None
        self._begin = self._read()
        return load

    def _read(self) -> _Reading:
        own = os.times()  # of this process and its ended children
        used = own.user + own.system + own.children_user + own.children_system
        return _Reading(time.perf_counter(), _busy_seconds(self._stat), _waited_seconds(self._pressure), used)


def _busy_seconds(stat: Path) -> float | None:
    try:
        fields = [int(field) for field in stat.read_text(encoding="ascii").splitlines()[0].split()[1:9]]
        user, nice, system, _, _, irq, softirq, _ = fields  # idle, iowait and stolen time do not count as busy
        return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _waited_seconds(pressure: Path) -> float | None:
    """Returns the total of the line `some avg10=0.00 avg60=0.00 avg300=0.00 total=MICROSECONDS`; None if the kernel has no PSI."""
    try:
        line = next(line for line in pressure.read_text(encoding="ascii").splitlines() if line.startswith("some "))
        return int(line.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError, StopIteration):
        return None


def _processors(stat: Path) -> int:
    """Returns the number of processors in the file. A container may be allowed fewer of them."""
    lines = stat.read_text(encoding="ascii").splitlines()
    return sum(line.startswith("cpu") and line[3:4].isdigit() for line in lines) or usable_processors()
