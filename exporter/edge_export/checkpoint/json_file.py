"""Values from untrusted files: JSON objects, whose size is checked before reading, and single values with their types and limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_devices.files.limited_read import FileTooLarge, read_at_most
from edge_export.errors import CheckpointError

MAX_JSON_BYTES = 256 << 20
MAX_SIZE = 1 << 24
# Within float32, the type of numbers in GGUF and ONNX.
MAX_NUMBER = 1e30
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(path: Path) -> None:
    """Raises CheckpointError for a git-lfs pointer, which a clone without git-lfs has in place of a file."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CheckpointError(f"{path} is a git-lfs pointer, not the file itself; run git lfs pull in its folder, or download it again")


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Returns the JSON object in `path`. Raises CheckpointError if it is missing, larger than `max_bytes`, or not a JSON object."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; download the checkpoint again, with all its files")
    try:
        data = json.loads(read_at_most(path, max_bytes).decode())
    except FileTooLarge as error:
        raise CheckpointError(f"{path} has more than the {max_bytes} bytes such a file may have; check where it came from") from error
    except (ValueError, RecursionError) as error:
        refuse_pointer(path)
        raise CheckpointError(f"{path} is not JSON ({error}); download the checkpoint again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} contains a JSON {type(data).__name__}, not an object; download the checkpoint again")
    return data


def read_optional_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Like read_json_object, but a missing file is an empty object."""
    return read_json_object(path, max_bytes) if path.is_file() else {}


class CheckedValues:
    """Takes checked values out of a mapping. An error names the file and the key, which begins with `where`, and ends in `advice`."""

    def __init__(self, values: Mapping[str, Any], path: Path, where: str, advice: str) -> None:
        self.values, self.path = values, path
        self.where, self._advice = where, advice

    def get(self, key: str) -> Any:
        """Returns the value as it is, None without one."""
        return self.values.get(key)

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """Returns the error for a value; `expected` is what it should be."""
        return CheckpointError(f"{self.path}: {self.where}{key} is {repr(self.get(key))[:200]}, not {expected}; {self._advice}")

    def integer(self, key: str, low: int = 1, high: int = MAX_SIZE, default: int | None = None) -> int:
        """Returns an integer within these limits."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
            raise self.wrong(key, f"a positive number of at most {MAX_NUMBER:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def array(self, key: str, length: int) -> list[Any]:
        """Returns a list of this length."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) != length:
            raise self.wrong(key, f"an array of {length} values")
        return value

    def section(self, key: str) -> CheckedValues:
        """Returns the values of an object."""
        value = self.get(key)
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return CheckedValues(value, self.path, f"{self.where}{key}.", self._advice)

    def over(self, defaults: Mapping[str, Any]) -> CheckedValues:
        """Returns these values over others, which count for keys that are missing."""
        return CheckedValues({**defaults, **self.values}, self.path, self.where, self._advice)

    def demand(self, key: str, *allowed: Any) -> None:
        """Raises CheckpointError unless the value is one of these; the first is the default."""
        if self.values.get(key, allowed[0]) not in allowed:
            raise self.wrong(key, " or ".join(repr(value) for value in allowed))
