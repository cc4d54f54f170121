"""Numbers of a manifest that no bundle has: sizes of nothing or less, and those beyond what JSON's readers agree on."""

from __future__ import annotations

import dataclasses
from typing import Any

from edge_devices.files.typed_json import StructureError

LARGEST = 1 << 53
# Ids, and counts of what there need not be any; every other number is at least 1, or above 0 where it may be broken.
FROM_ZERO = frozenset(
    {
        "bytes",
        "per_layer_size",
        "rotated_pairs",
        "draft_length",
        "layer",
        "owner_layers",
        "layer_owners",
        "drafter_sources",
        "bos_token",
        "eos_token",
        "eog_tokens",
        "control_tokens",
    }
)


def check_numbers(value: Any, where: str, name: str = "") -> None:
    """Raises StructureError with the place of the first such number in `value` and all it holds; free-form objects are not looked into."""
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
        least = "0" if from_zero else "1" if isinstance(number, int) else "above 0"
        raise StructureError(f"{where} is {number}, not {least} to 2^53")
