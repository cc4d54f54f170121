"""What `make test` leaves out: the list is of tests that exist, and time is charged to those who spend it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import short_set

ROOT = Path(__file__).parents[1]
pytest_plugins = ["pytester"]
SUITE = """
    import time
    import pytest

    def spend(seconds):
        begin = time.process_time()
        while time.process_time() < begin + seconds:
            pass

    @pytest.fixture(scope="module")
    def shared():
        spend(0.4)

    @pytest.mark.parametrize("number", [1, 2, 3, 4])
    def test_short(shared, number): ...

    def test_long():
        spend(0.2)

    @pytest.mark.parametrize("seconds", [0, 0.2])
    def test_one_of_two(seconds):
        spend(seconds)
"""


def test_each_listed_test_exists() -> None:
    listed, total = short_set.long_tests()
    assert total > len(listed)
    sources = {name: (ROOT / name).read_text(encoding="utf-8") for name in {test.partition("::")[0] for test in listed}}
    functions = {test: re.split(r"\[|::", test.partition("::")[2])[0] for test in listed}
    assert [test for test, function in functions.items() if f"def {function}(" not in sources[test.partition("::")[0]]] == []


def test_long_tests_are_listed_and_left_out(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixture's time is divided among the tests that use it; parameters are listed one by one unless each is long."""
    monkeypatch.setattr(short_set, "LONG", pytester.path / "long.txt")
    monkeypatch.setattr(short_set, "LIMIT", 0.15)
    pytester.makepyfile(test_it=SUITE)
    options = ("-p", "short_set", "-p", "no:randomly", "-p", "no:xdist")
    pytester.runpytest_inprocess(*options, "--measure", "7").assert_outcomes(passed=7)
    assert short_set.long_tests() == ({"test_it.py::test_long", "test_it.py::test_one_of_two[0.2]"}, 7)
    result = pytester.runpytest_inprocess(*options, "--short")
    result.assert_outcomes(passed=5, deselected=2)
    result.stdout.fnmatch_lines([f"make test-all runs 2 more tests, which need {short_set.NEEDS}"])


PROPERTY = """
    import zlib
    import pytest
    from hypothesis import given, strategies

    drawn = []

    @given(strategies.integers(), strategies.text())
    def test_numbers(number, text):
        drawn.append((number, text))

    def test_they_are_printed():
        print(zlib.crc32(repr(drawn).encode()))

    @given(number=strategies.integers(), text=strategies.just("a"))
    def test_small_numbers(number, text):
        assert number < 1000

    @pytest.mark.parametrize("reason", [*"aaabbbccdefg"])
    def test_skips(reason):
        pytest.skip(f"needs {reason}")
"""


def test_a_short_run_draws_the_same_examples_and_ends_with_what_keeps_a_failing_one_and_why_tests_were_skipped(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
    pytester.makepyfile(test_it=PROPERTY)
    options = ("-p", "short_set", "-p", "no:randomly", "-p", "no:xdist", "-rf", "-s", "--short")
    results = [pytester.runpytest_subprocess(*options) for _ in range(2)]
    printed = [re.search(r"^test_it.py \.\d+$", str(result.stdout), re.MULTILINE) for result in results]
    assert printed[0]
    assert printed[1]
    assert printed[0][0] == printed[1][0]
    results[0].stdout.fnmatch_lines(
        [
            "add to test_it.py::test_small_numbers: @example(number=1000, text='a')",
            "skipped 3: needs a",
            "skipped 3: needs b",
            "skipped 2: needs c",
            "skipped 1: needs d",
            "skipped 3: for other reasons",
        ]
    )


def test_workers_begin_with_the_files_that_take_longest(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_a="def test_short(): ...",
        test_b="import pytest\n\ndef test_short(): ...\n\n@pytest.mark.slow\ndef test_slow(): ...",
        test_c="def test_short(): ...\n\ndef test_other(): ...",
        test_d="import pytest\n\n@pytest.mark.slow(50)\ndef test_slower(): ...",
    )
    options = ("-p", "short_set", "-p", "xdist", "-p", "no:randomly", "--no-loadscope-reorder")
    lines = pytester.runpytest_inprocess(*options, "--collect-only", "-q").outlines
    names = [
        "test_d.py::test_slower",
        "test_b.py::test_slow",
        "test_b.py::test_short",
        "test_c.py::test_short",
        "test_c.py::test_other",
        "test_a.py::test_short",
    ]
    assert [line for line in lines if "::" in line] == names
