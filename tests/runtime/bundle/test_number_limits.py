"""Numbers nothing can be computed with are refused where a file is read, whatever the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from edge_devices.files.typed_json import StructureError, from_json

HUGE = 10**400


@dataclass(frozen=True, kw_only=True)
class Record:
    whole: int = 1
    broken: float = 1.0
    free: Any = None


@pytest.mark.parametrize("value", [HUGE, -HUGE, (1 << 64) + 1])
@pytest.mark.parametrize("key", ["whole", "broken", "free"])
def test_a_huge_integer(key: str, value: int) -> None:
    with pytest.raises(StructureError, match=rf"record\.{key} is or holds an integer of \d+ bits, more than 64"):
        from_json(Record, {key: value}, "record")


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_is_not_finite(value: float) -> None:
    for data in ({"broken": value}, {"free": [{"a": value}]}):
        with pytest.raises(StructureError, match="not a finite number"):
            from_json(Record, data, "record")


def test_seeds_of_64_bits_are_read() -> None:
    assert from_json(Record, {"whole": (1 << 64) - 1}, "record").whole == (1 << 64) - 1


def test_free_values_may_be_deeper_than_python_recurses() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert from_json(Record, {"free": deep}, "record").free is deep
