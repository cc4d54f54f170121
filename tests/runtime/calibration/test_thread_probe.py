"""Threads of each phase: candidates from the machine's clusters, the choice on a scripted machine, and what the backend makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_devices.files.typed_json import from_json, to_json
from edge_devices.machine import processors
from edge_devices.machine.processors import clusters, fastest, keep_to_fastest
from edge_runtime.calibration.first_use import PHASES, ThreadCounts, ThreadTimes, candidates, measure_threads
from scripted import TimedDrafter, TimedTarget

# A Pixel 8: one, four and four cores; an RK3588 without capacities; a Pi 5.
PHONE = {0: 160, 1: 160, 2: 160, 3: 160, 4: 498, 5: 498, 6: 498, 7: 498, 8: 1024}
BOARD = {**dict.fromkeys(range(4), 1_800_000), **dict.fromkeys(range(4, 8), 2_400_000)}


def system(root: Path, speeds: dict[int, int], file: str) -> Path:
    for number, speed in speeds.items():
        path = root / f"cpu{number}" / file
        path.parent.mkdir(parents=True)
        path.write_text(f"{speed}\n")
    return root


def test_clusters_come_fastest_first(tmp_path: Path) -> None:
    assert clusters(PHONE, system(tmp_path / "phone", PHONE, "cpu_capacity")) == [[8], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert clusters(BOARD, system(tmp_path / "board", BOARD, "cpufreq/cpuinfo_max_freq")) == [[4, 5, 6, 7], [0, 1, 2, 3]]
    favoured = {0: 5_000_000, 1: 4_900_000, 2: 5_000_000, 3: 4_900_000}
    assert clusters(favoured, system(tmp_path / "desktop", favoured, "cpufreq/cpuinfo_max_freq")) == [[0, 2, 1, 3]]
    assert clusters([2, 0], tmp_path / "nothing") == [[0, 2]], "a system that does not tell"
    assert clusters([4, 8], tmp_path / "phone") == [[8], [4]], "only what the process may use"


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 16))
def test_the_fastest_clusters_that_have_room_are_taken(sizes: list[int], count: int) -> None:
    numbers = iter(range(100))
    groups = [[next(numbers) for _ in range(size)] for size in sizes]
    chosen = fastest(count, groups)
    assert len(chosen) >= min(count, sum(sizes))
    assert chosen == [number for group in groups for number in group][: len(chosen)]
    tried = candidates(groups)
    assert all(1 <= n <= sum(sizes) for phase in PHASES for n in tried[phase])
    assert sum(sizes) in tried["verify"]


def test_affinity_is_left_alone_where_cores_are_alike(monkeypatch) -> None:
    kept: list[set[int]] = []
    monkeypatch.setattr(processors, "stay_on", lambda expected: kept.append(set(expected)))
    keep_to_fastest(1, [[0, 1]])
    assert kept == []
    keep_to_fastest(3, [[8], [4, 5], [0]])
    assert kept == [{8, 4, 5}]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or (os.cpu_count() or 1) < 2, reason="needs two processors on Linux")
def test_a_process_really_stays_where_it_is_kept() -> None:
    code = (
        "import os, threading; from edge_devices.machine.processors import stay_on; held = threading.Event(); one = 0\n"
        "os.sched_setaffinity(0, range(os.cpu_count()))  # a worker of the tests may be kept on one\n"
        "thread = threading.Thread(target=held.wait); thread.start(); stay_on([one])\n"
        "print([os.sched_getaffinity(t) == {one} for t in (threading.get_native_id(), thread.native_id)]); held.set()"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[True, True]"


class Machine:
    """A clock, and a pair that takes so many seconds on the threads in use."""

    def __init__(self, seconds: dict[str, dict[int, float]]) -> None:
        self.now, self.seconds = 0.0, seconds
        self.used: list[ThreadCounts] = []

    def use(self, counts: ThreadCounts) -> None:
        self.used.append(counts)

    def spend(self, phase: str, _rows: int) -> None:
        self.now += self.seconds[phase][getattr(self.used[-1], phase)]


def chosen(seconds: dict[str, dict[int, float]], groups: list[list[int]], *, drafter: bool = True) -> tuple[ThreadCounts, Machine]:
    machine = Machine(seconds)
    target = TimedTarget(machine.spend)
    pair = TimedDrafter(target, machine.spend) if drafter else None
    times = measure_threads(target, pair, machine.use, candidates(groups), 1, clock=lambda: machine.now)
    assert target.length == 0
    return times.best(), machine


def test_each_phase_gets_its_own_best_number() -> None:
    seconds = {"prefill": {1: 4.0, 2: 2.0, 4: 1.0}, "verify": {1: 2.0, 2: 1.0, 4: 1.5}, "draft": {1: 0.1, 2: 0.2, 4: 0.3}}
    counts, _ = chosen(seconds, [[0, 1, 2, 3]])
    assert counts == ThreadCounts(prefill=4, verify=2, draft=1)


def test_fewer_threads_are_taken_where_more_bring_nothing() -> None:
    same = dict.fromkeys((1, 2, 4), 1.0)
    counts, machine = chosen({"prefill": same, "verify": {**same, 4: 0.98}, "draft": same}, [[0, 1, 2, 3]], drafter=False)
    assert counts == ThreadCounts(prefill=2, verify=2, draft=1)
    assert machine.now < 60, "the time is bounded: two rounds after the first that warms up"


def test_cached_times_are_checked_and_a_busy_first_use_corrected() -> None:
    counts = candidates([[0, 1]])
    busy = ThreadTimes(seconds={phase: {n: float(n) for n in counts[phase]} for phase in PHASES})
    calm = ThreadTimes(seconds={phase: {n: 0.5 / n for n in counts[phase]} for phase in PHASES})
    read = from_json(ThreadTimes, json.loads(json.dumps(to_json(busy))), "threads")
    assert read == busy
    assert read.are_of(counts)
    assert (busy.best(), busy.combined(calm).best()) == (ThreadCounts.same(1), ThreadCounts.same(2))
    assert not read.are_of(candidates([[0, 1, 2, 3]])), "another number of processors"
    for seconds in (-1.0, 3600.0, float("nan")):
        with pytest.raises(ValueError, match="are not the seconds of phases"):
            ThreadTimes(seconds={"draft": {1: seconds}})
    for damage in ({"seconds": {"draft": {"one": 1.0}}}, {"seconds": {"draft": {"1": "1"}}}, {"seconds": {"draft": 1}}):
        with pytest.raises(ValueError, match=r"threads\.seconds"):
            from_json(ThreadTimes, damage, "threads")
