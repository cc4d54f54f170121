"""The time of day may be set while a program runs: it is for records and ages of files, and every duration is another clock's."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from edge_devices.machine.system import WallClock

ROOT = Path(__file__).parents[1]
CALLS = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.strftime", "time.ctime"} | {
    f"{module}datetime.{name}" for module in ("", "datetime.") for name in ("now", "utcnow", "today")
}
DAY = 86400.0
# What each module has the time of day for, and why a jump of it does no harm.
USES = {
    "devices/edge_devices/files/atomic_write.py": "age of an unlocked file whose process number is in use again; a locked one is never old",
    "devices/edge_devices/machine/system.py": "notices jumps",
    "exporter/edge_export/pipeline/export.py": "label of a manifest",
    "runtime/edge_bench/cli/devices.py": "name of a run",
    "runtime/edge_bench/measure/benchmark.py": "label of a record, whose note states jumps",
    "runtime/edge_runtime/bundle/bundle.py": "a file from the future is hashed again",
    "runtime/edge_runtime/calibration/measured.py": "a provisional value is measured again after ten minutes, whichever way they went",
    "runtime/edge_runtime/server/apis/ollama.py": "label of an answer",
    "runtime/edge_runtime/server/apis/openai.py": "label of an answer",
    "runtime/edge_runtime/server/apis/responses_api.py": "label of an answer",
    "runtime/edge_runtime/session/monitor.py": "label of a record",
    "runtime/edge_runtime/text/template_environment.py": "a template asks for the date",
}


def uses_of(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    froms = [
        f"{node.module}.{alias.name}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names if node.module
    ]
    return [name for name in (*names, *froms) if name in CALLS]


def test_no_duration_is_taken_from_the_time_of_day() -> None:
    """A module that comes to use it is added with its reason, after a look at what a jump of a day does there."""
    result = {
        path.relative_to(ROOT).as_posix()
        for package in ("devices", "exporter", "runtime")
        for path in (ROOT / package).rglob("*.py")
        if uses_of(path)
    }
    assert result == set(USES)


def test_the_kernels_ask_for_no_time_at_all() -> None:
    sources = [path for path in (ROOT / "runtime/edge_runtime/backends/kernels/src").rglob("*.*") if path.is_file()]
    assert len(sources) > 50
    assert [path.name for path in sources if re.search(r"clock|chrono|gettimeofday|\btime\(", path.read_text(encoding="utf-8"))] == []


class Clocks:
    """Two clocks that go on together; the time of day can be set."""

    def __init__(self) -> None:
        self.steady, self.day = 100.0, 1.7e9

    def pass_time(self, seconds: float, wall: float | None = None) -> None:
        self.steady += seconds
        self.day += seconds if wall is None else wall

    def watch(self) -> WallClock:
        return WallClock(now=lambda: self.day, clock=lambda: self.steady)


@pytest.mark.parametrize("jump", [DAY, -DAY, 3600.0, -3600.0, 20.0])
def test_a_jump_of_the_time_of_day_is_noticed(jump: float) -> None:
    clocks = Clocks()
    watch = clocks.watch()
    clocks.pass_time(600.0)
    assert watch.moved_by() == 0.0
    clocks.day += jump
    clocks.pass_time(600.0)
    assert watch.moved_by() == pytest.approx(jump)


def test_a_clock_that_is_steered_does_not_jump() -> None:
    clocks = Clocks()
    watch = clocks.watch()
    clocks.pass_time(6 * 3600.0, wall=6 * 3600.0 * (1 + 500e-6))
    assert watch.moved_by() == 0.0
