"""Checks of a manifest that its dataclasses cannot express: its own hash, and the range of its numbers.

The hash is the last key: the sha256 of the whole file with zeros in place of the 64 digits. It covers bytes rather than what the JSON
means, so that every changed bit is found.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from edge_devices.files.typed_json import StructureError

_KEY = "sha256"
_BLANK = "0" * 64
_END = re.compile(rb'"sha256": "([0-9a-f]{64})"\n\}\n')
_END_BYTES = len(f'"{_KEY}": "{_BLANK}"\n}}\n')
LARGEST = 1 << 53
# Ids, and counts that may be zero; every other integer is at least 1, every other number above 0.
FROM_ZERO = frozenset(
    {
        "bytes",
        "per_layer_size",
        "rotated_pairs",
        "draft_length",
        "acceptance_before",
        "layer",
        "owner_layers",
        "layer_owners",
        "drafter_sources",
        "bos_token",
        "eos_token",
        "eog_tokens",
        "control_tokens",
        "temperature",
        "top_k",
        "min_p",
        "end_tokens",
        "suppress_tokens",
    }
)


def with_hash(data: Mapping[str, Any]) -> str:
    """Returns the text of manifest.json with this data; a hash among the data is replaced."""
    content = {key: value for key, value in data.items() if key != _KEY}
    text = json.dumps({**content, _KEY: _BLANK}, indent=2) + "\n"
    before = text[: len(text) - _END_BYTES]
    return before + text[len(before) :].replace(_BLANK, hashlib.sha256(text.encode()).hexdigest())


def has_own_hash(raw: bytes) -> bool:
    """Whether these bytes of a manifest end in their own hash."""
    before = raw[:-_END_BYTES]
    end = _END.fullmatch(raw, len(before))
    if end is None:
        return False
    blanked = before + end[0].replace(end[1], _BLANK.encode())
    return hashlib.sha256(blanked).hexdigest().encode() == end[1]


def check_numbers(value: Any, where: str, name: str = "") -> None:
    """Raises StructureError for the first number in `value`, or nested in it, that is out of range; free-form objects are skipped."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            check_numbers(getattr(value, field.name), f"{where}.{field.name}", field.name)
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            check_numbers(item, f"{where}[{i}]", name)
    elif isinstance(value, dict):
        for key, item in value.items():
            if dataclasses.is_dataclass(item):
                check_numbers(item, f"{where}.{key}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _check(value, where, name in FROM_ZERO)


def _check(number: float, where: str, from_zero: bool) -> None:
    if number < 0 or (number == 0 and not from_zero) or number > LARGEST:
        minimum = "0" if from_zero else "1" if isinstance(number, int) else "above 0"
        raise StructureError(f"{where} is {number}, not {minimum} to 2^53")
