"""The processors this process may use, fastest first, and how to stay on some of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from functools import cache
from itertools import accumulate, groupby
from pathlib import Path

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
