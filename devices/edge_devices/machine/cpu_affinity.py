"""The processors this process may use, fastest first, and how to stay on some of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from functools import cache
from itertools import accumulate, groupby
from pathlib import Path

# ggml ends the process where it is asked for more.
MOST_THREADS = 512
_SYSTEM = Path("/sys/devices/system/cpu")
# Relative speed as the scheduler knows it (Linux, Documentation/scheduler/sched-capacity.rst); where it is missing, the highest frequency.
_SPEEDS = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")
# The same cores differ a little in what they promise (favoured cores of desktop processors); clusters differ by more.
_SAME = 0.9


@cache
def processor_groups() -> list[list[int]]:
    """The processors this process may run on, by their numbers, grouped by speed, the fastest first. As it was when first asked."""
    return clusters(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def clusters(processors: Iterable[int], root: Path = _SYSTEM) -> list[list[int]]:
    """Groups processors by speed, the fastest first; one group where they are alike or the system does not tell."""
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
    """Where cores differ, keeps this process on the fastest that hold so many threads."""
    if len(groups) > 1:
        stay_on(fastest(threads, groups))


def stay_on(processors: Iterable[int]) -> None:
    """Keeps all threads of this process on these processors, those made later too; where the system cannot do it, nothing changes."""
    if not hasattr(os, "sched_setaffinity"):
        return
    wanted = set(processors)
    threads = Path("/proc/self/task")
    for thread in [int(path.name) for path in threads.iterdir()] if threads.is_dir() else [0]:
        with contextlib.suppress(OSError):  # a thread that ended, or a system that reserves processors for others
            os.sched_setaffinity(thread, wanted)


def _speed(folder: Path) -> int | None:
    for name in _SPEEDS:
        with contextlib.suppress(OSError, ValueError):
            return int((folder / name).read_text(encoding="ascii"))
    return None
