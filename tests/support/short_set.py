"""Which tests `make test` runs, decided by what they need and by their processor time.

`--short` leaves out the tests of LONG, which took LIMIT seconds of processor time or more, and those whose fixtures need more than Python
packages (MACHINE). A test that needs a library outside requirements/test.txt skips itself. `--measure` writes LONG anew. A short run draws
the same examples of property tests each time, and ends with the reasons for which tests were skipped. Any other run explores: where a drawn
example fails, it ends with the decorator that keeps this example.

With `--no-loadscope-reorder`, workers begin with the files that take longest, so that none is left with one of them at the end.
"""

from __future__ import annotations

import os
import random
import re
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

LIMIT = 0.5
LONG = Path(__file__).parents[1] / "data" / "long_tests.txt"
# Fixtures that start what no Python package brings.
MACHINE = {"browser", "desk", "host"}
TOTAL = "# tests in all: "
NEEDS = "a C++ compiler (llama.cpp), PyTorch, Chromium, adb, sshd, qemu, or more than half a second of processor time each"
# About what a test takes, in seconds, by which files are ordered; slow(seconds) names another number.
SLOW_SECONDS, LONG_SECONDS, SHORT_SECONDS = 5.0, 1.0, 0.05
# How many lines of a short run's end are reasons of skipped tests.
REASONS = 5
# What Hypothesis prints of a drawn example that fails.
_FALSIFYING = re.compile(r"(?:Falsifying example|Failing test case): \w+\(\n?(.*?)\n?\s*\)$", re.MULTILINE | re.DOTALL)
_HEADER = "# Tests of half a second of processor time and more, which make test leaves out. Written by make test-times.\n"


def long_tests() -> tuple[set[str], int]:
    """The tests of LONG, and how many tests there were in all when it was written."""
    lines = LONG.read_text(encoding="utf-8").splitlines() if LONG.exists() else []
    total = next((int(line.removeprefix(TOTAL)) for line in lines if line.startswith(TOTAL)), 0)
    return {line for line in lines if line and not line.startswith("#")}, total


def processor_seconds() -> float:
    """What this process has taken, and those of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Meter:
    """Takes the processor time of each test; that of a fixture of wider scope is divided among the tests that use it."""

    def __init__(self) -> None:
        self.tests: dict[str, float] = defaultdict(float)
        self.fixtures: dict[tuple[str, str], float] = defaultdict(float)
        self.users: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._inside = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        begin, self._inside = processor_seconds(), 0.0
        try:
            return (yield)
        finally:
            self.tests[item.nodeid] += processor_seconds() - begin - self._inside
            for name in getattr(item, "fixturenames", ()):
                for scope in ("", str(item.path)):
                    self.users[name, scope].add(item.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Generator[None, object, object]:
        begin, before = processor_seconds(), self._inside
        try:
            return (yield)
        finally:
            own = processor_seconds() - begin - (self._inside - before)
            if fixturedef.scope != "function":
                self.fixtures[fixturedef.argname, str(request.path) if fixturedef.scope == "module" else ""] += own
                self._inside += own

    def seconds(self) -> dict[str, float]:
        """The seconds of each test with its share of the fixtures."""
        seconds = dict(self.tests)
        for key, spent in self.fixtures.items():
            users = self.users[key] & seconds.keys()
            for user in users:
                seconds[user] += spent / len(users)
        return seconds

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["seconds"] = self.seconds()


class Selection:
    """Chooses the tests, gathers what the workers measured, and ends with a few lines."""

    def __init__(self, config: pytest.Config, meter: Meter | None) -> None:
        self.config = config
        self.short = bool(config.getoption("short"))
        self.meter = meter
        self.seconds: dict[str, float] = {}
        self.long, self.total = long_tests()
        self.last_line = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if not self.short:
            if not self.config.getoption("loadscopereorder", True):
                items[:] = self._longest_first(items)
            return
        out = [item for item in items if _listed(item.nodeid, self.long) or MACHINE & set(getattr(item, "fixturenames", ()))]
        if out:
            self.config.hook.pytest_deselected(items=out)
            left_out = set(out)
            items[:] = [item for item in items if item not in left_out]

    def _longest_first(self, items: list[pytest.Item]) -> list[pytest.Item]:
        """Whole files, in each its slow tests first: in random order where pytest-randomly is there, whose seed all workers have."""
        files: dict[Path, list[pytest.Item]] = defaultdict(list)
        for item in items:
            files[item.path].append(item)
        chance = random.Random(self.config.getoption("randomly_seed", 0))
        for tests in files.values():
            slow = [item for item in tests if item.get_closest_marker("slow")]
            chance.shuffle(slow)
            tests[:] = [*slow, *(item for item in tests if not item.get_closest_marker("slow"))]
        ordered = sorted(files.values(), key=lambda tests: -sum(map(self._about, tests)))
        return [item for tests in ordered for item in tests]

    def _about(self, item: pytest.Item) -> float:
        if slow := item.get_closest_marker("slow"):
            return float(slow.args[0]) if slow.args else SLOW_SECONDS
        return LONG_SECONDS if _listed(item.nodeid, self.long) else SHORT_SECONDS

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.seconds.update(getattr(node, "workeroutput", {}).get("seconds", {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in _examples(terminalreporter.stats.get("failed", ())):
            terminalreporter.write_line(line)
        if self.meter is not None:
            self.seconds.update(self.meter.seconds())
            LONG.write_text(_text(self.seconds, self.config.getoption("measure")), encoding="utf-8")
            terminalreporter.write_line(f"{LONG} is written")
        if self.short:
            for line in _reasons(terminalreporter.stats.get("skipped", ())):
                terminalreporter.write_line(line)
        if self.short and self.total:
            ran = sum(len(terminalreporter.stats.get(outcome, ())) for outcome in ("passed", "failed", "xfailed", "xpassed"))
            self.last_line = f"make test-all runs {max(self.total - ran, 0)} more tests, which need {NEEDS}"

    def pytest_unconfigure(self) -> None:
        """Beneath pytest's own last line."""
        if self.last_line:
            print(self.last_line)


def _listed(test: str, long: set[str]) -> bool:
    return test in long or test.partition("[")[0] in long


def _reasons(skipped: Iterable[Any]) -> list[str]:
    """For what reasons tests were skipped, the frequent ones first."""
    counts = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped if isinstance(report.longrepr, tuple))
    frequent = counts.most_common(None if len(counts) <= REASONS else REASONS - 1)
    rest = sum(counts.values()) - sum(count for _, count in frequent)
    return [f"skipped {count}: {reason}" for reason, count in frequent] + ([f"skipped {rest}: for other reasons"] if rest else [])


def _examples(failed: Iterable[Any]) -> list[str]:
    """The decorators that keep the drawn examples that failed, without Hypothesis' comments."""
    plain = ((report.nodeid, re.sub(r"^E   ?|  # .*$", "", str(report.longrepr), flags=re.MULTILINE)) for report in failed)
    drawn = ((test, _FALSIFYING.search(text)) for test, text in plain)
    return [f"add to {test}: @example({' '.join(example[1].split()).rstrip(',')})" for test, example in drawn if example]


def _text(seconds: dict[str, float], total: int) -> str:
    """The file's lines; a test of which each parameter is long is named once."""
    parameters: dict[str, list[str]] = defaultdict(list)
    for test in seconds:
        parameters[test.partition("[")[0]].append(test)
    names: Iterable[str] = (
        name
        for function, tests in parameters.items()
        for name in ([function] if all(seconds[test] >= LIMIT for test in tests) else [test for test in tests if seconds[test] >= LIMIT])
    )
    return "".join([_HEADER, f"{TOTAL}{total}\n", *(f"{name}\n" for name in sorted(names))])


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("edge-mtp")
    group.addoption("--short", action="store_true", help="leave out what takes half a second or needs more than Python packages")
    group.addoption("--measure", type=int, metavar="TOTAL", help="write tests/data/long_tests.txt, with this number of tests in all")


def pytest_configure(config: pytest.Config) -> None:
    """Measures where that is asked for, and selects everywhere."""
    meter = Meter() if config.getoption("measure") else None
    if meter is not None:
        config.pluginmanager.register(meter, "edge-mtp-meter")
    config.pluginmanager.register(Selection(config, meter), "edge-mtp-selection")
    # No test is timed: on a busy machine an example may wait for its turn.
    hypothesis.settings.register_profile("edge-mtp", deadline=None, derandomize=bool(config.getoption("short")))
    hypothesis.settings.load_profile("edge-mtp")
