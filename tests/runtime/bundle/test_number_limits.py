"""Numbers nothing can be computed with are refused where a file is read, whatever the file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edge_bench.devices.remote_run import read_package
from edge_devices.files.typed_json import StructureError, from_json
from edge_runtime.errors import RequestError
from edge_runtime.session.chat import ChatSettings
from edge_runtime.session.saved import chat_file

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


@pytest.mark.parametrize("change", [{"temperature": HUGE}, {"logit_bias": {"3": HUGE}}, {"seed": HUGE}])
def test_a_saved_chat_with_such_a_number(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "chat.json"
    chat_file.save(path, ChatSettings(), [])
    record = json.loads(path.read_text())
    record["settings"]["sampling"] |= change
    path.write_text(json.dumps(record))
    with pytest.raises(RequestError, match="choose a file that /save wrote"):
        chat_file.load(path, ChatSettings)


def test_a_device_package_with_such_a_number(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"schema": 2, "platform": "linux-x64", "files": [{"path": "a", "bytes": 1e999}]}')
    with pytest.raises(RequestError, match=r"cannot be read \(.*infinity.*build the package again"):
        read_package(tmp_path)
