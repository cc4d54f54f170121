"""Machines of fast and slow cores whose power is known: how long a round takes on which of them, and how many joules.

A batch waits for its slowest thread, or for the memory, of which a few cores reach only a part. Threads that wait at a barrier poll, and
so take as many watts as those that compute; caches and memory take theirs while any core works, and the rest of the device all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edge_runtime.calibration.placement import Placement, RoundEnergy
from edge_runtime.calibration.thread_probe import ThreadCounts
from scripted import TimedDrafter, TimedTarget

WINDOW_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal cores: how many, operations and bytes each gets done a second, and watts of one that works."""

    cores: int
    operations: float
    bytes: float
    watts: float


@dataclass(frozen=True, kw_only=True)
class Cores:
    """A machine, its clusters from the fastest on. `bytes`: a second of all cores together; `rows`: operations of a row / bytes of a batch;
    `barrier_s`: seconds that each thread adds to a batch; `draft`: size of a draft step / of a batch.
    """

    clusters: tuple[Cluster, ...]
    bytes: float
    rows: float
    barrier_s: float
    draft: float
    idle_watts: float
    shared_watts: float

    @property
    def groups(self) -> list[list[int]]:
        """Numbers of the processors, grouped by speed."""
        numbers = iter(range(sum(item.cores for item in self.clusters)))
        return [[next(numbers) for _ in range(item.cores)] for item in self.clusters]

    def batch(self, rows: int, processors: Sequence[int], threads: int, size: float = 1.0) -> tuple[float, float]:
        """Seconds and joules of one batch on the fastest of these processors."""
        of = [item for item in self.clusters for _ in range(item.cores)]
        used = [of[number] for number in sorted(processors)][:threads]
        compute = rows * self.rows / (len(used) * min(item.operations for item in used))
        memory = 1.0 / min(self.bytes, sum(item.bytes for item in used))
        seconds = size * max(compute, memory) + self.barrier_s * len(used)
        return seconds, seconds * (self.idle_watts + self.shared_watts + sum(item.watts for item in used))

    def round(self, placement: Placement) -> tuple[float, float]:
        """Seconds and joules of a round: a forward of one row, three drafts, a verify of four rows."""
        threads = placement.threads
        parts = [self.batch(rows, placement.processors, threads.verify) for rows in (1, 4)]
        parts += [self.batch(1, placement.processors, threads.draft, self.draft)] * 3
        seconds, joules = zip(*parts, strict=True)
        return sum(seconds), sum(joules)


class Bench:
    """A clock and a pair whose work takes what `cores` take on the placement in use, and a meter with errors. Implements PowerSource."""

    name, window_s = "simulated package", WINDOW_S

    def __init__(self, cores: Cores, seed: int, *, noise: float = 0.01, jitter: float = 0.01) -> None:
        self.cores, self.now, self.joules, self.windows = cores, 0.0, 0.0, 0
        self.noise, self.jitter, self.random = noise, jitter, np.random.default_rng(seed)
        self.placement = Placement(processors=(0,), threads=ThreadCounts.same(1))
        self.target = TimedTarget(self.spend)
        self.drafter = TimedDrafter(self.target, self.spend)

    def use(self, placement: Placement) -> None:
        """Moves the work."""
        self.placement = placement

    def spend(self, phase: str, rows: int) -> None:
        """Runs a batch of a draft or a verify."""
        if phase == "prefill":
            return
        size = self.cores.draft if phase == "draft" else 1.0
        seconds, joules = self.cores.batch(rows, self.placement.processors, getattr(self.placement.threads, phase), size)
        self.now += seconds * (1 + self.jitter * abs(self.random.standard_normal()))
        self.joules += joules

    def clock(self) -> float:
        """Seconds."""
        return self.now

    def energy_of(self, work: Callable[[], None]) -> RoundEnergy:
        """One round's joules, as a meter with `noise` states them."""
        begin, joules = self.now, self.joules
        work()
        self.windows += 1
        error = 1 + self.noise * self.random.standard_normal()
        return RoundEnergy(joules=(self.joules - joules) * error, seconds=self.now - begin, error=self.noise)


def draw_cores(seed: int) -> Cores:
    """Draws a phone of three clusters, a board of two, a machine of equal cores, or a laptop of two kinds of cores, in turn."""
    r = np.random.default_rng([seed, 5])

    def between(low: float, high: float) -> float:
        return float(r.uniform(low, high))

    def cluster(cores: int, *ranges: tuple[float, float]) -> Cluster:
        operations, bytes_, watts = (between(*item) for item in ranges)
        return Cluster(cores=cores, operations=operations, bytes=bytes_, watts=watts)

    kind = seed % 4
    if kind == 0:
        clusters = (
            cluster(1, (8, 12), (10, 16), (2, 4)),
            cluster(int(r.integers(3, 5)), (5, 7), (7, 10), (0.7, 1.5)),
            cluster(4, (1.5, 2.5), (2, 4), (0.15, 0.4)),
        )
    elif kind == 1:
        clusters = (cluster(4, (4, 6), (4, 8), (0.7, 1.5)), cluster(4, (1.2, 2.2), (1.5, 3), (0.15, 0.4)))
    elif kind == 2:
        clusters = (cluster(int(r.integers(2, 9)), (4, 20), (5, 15), (0.8, 6)),)
    else:
        clusters = (
            cluster(int(r.integers(2, 7)), (20, 30), (12, 22), (3, 8)),
            cluster(int(r.integers(4, 9)), (8, 16), (5, 10), (0.8, 2.5)),
        )
    return Cores(
        clusters=clusters,
        bytes=between(*((20, 40), (8, 18), (9, 50), (40, 90))[kind]),
        rows=between(0.2, 1.5),
        barrier_s=float(10 ** r.uniform(-5, -3.5)),
        draft=float(10 ** r.uniform(-2, -1)),
        idle_watts=between(0.5, 3),
        shared_watts=between(0.5, 3),
    )
