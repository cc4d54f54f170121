"""Whether other programs compete for the processors, from the time that they used and that this process did not."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge_devices.machine.facts import usable_processors

# Other programs may use this share of the processors before figures count as disturbed.
BUSY_SHARE = 0.15
_SHORTEST_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class MachineLoad:
    """`others` is the mean share of all processors that other programs used; None where the system does not say."""

    others: float | None
    seconds: float

    @property
    def is_busy(self) -> bool:
        """Whether other programs disturbed what was measured."""
        return self.others is not None and self.others > BUSY_SHARE

    def sentence(self) -> str:
        """Returns the load as one sentence."""
        if self.others is None:
            return "how busy the machine was is not known"
        advice = "; the figures are disturbed, close them and run again" if self.is_busy else ""
        return f"other programs used {self.others:.0%} of the processors meanwhile{advice}"

    def to_json(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        return asdict(self) | {"busy": self.is_busy}


def load_now(seconds: float = 0.5) -> MachineLoad:
    """Waits some seconds and returns the load meanwhile."""
    watch = LoadWatch()
    time.sleep(seconds)
    return watch.load()


class LoadWatch:
    """Measures the load from its creation on. Linux only; elsewhere the load is not known."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._begin = self._read()

    def load(self) -> MachineLoad:
        """Returns the load until now; unknown for spans too short for the system's clock ticks."""
        begin, end = self._begin, self._read()
        seconds = end[0] - begin[0]
        if begin[1] is None or end[1] is None or seconds < _SHORTEST_SECONDS:
            return MachineLoad(others=None, seconds=seconds)
        others = (end[1] - begin[1]) - (end[2] - begin[2])
        return MachineLoad(others=min(1.0, max(0.0, others / (seconds * _processors(self._stat)))), seconds=seconds)

    def _read(self) -> tuple[float, float | None, float]:
        """Returns the time, the busy seconds of all processors (None if unknown), and those of this process and its ended children."""
        own = os.times()
        try:
            fields = [int(field) for field in self._stat.read_text(encoding="ascii").splitlines()[0].split()[1:9]]
            user, nice, system, _, _, irq, softirq, _ = fields  # idle, iowait and stolen time are not busy
            busy: float | None = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError, AttributeError):
            busy = None
        return time.perf_counter(), busy, own.user + own.system + own.children_user + own.children_system


def _processors(stat: Path) -> int:
    """Returns how many processors the file counts; a container may use fewer of them."""
    lines = stat.read_text(encoding="ascii").splitlines()
    return sum(line.startswith("cpu") and line[3:4].isdigit() for line in lines) or usable_processors()
