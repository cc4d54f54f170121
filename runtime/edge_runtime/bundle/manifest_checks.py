"""The manifest's hash of itself, its last key: the sha256 of the whole file as it is with zeros in place of the 64 digits.

Over bytes, and not over what the JSON means, so that every changed bit is seen.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

_KEY = "sha256"
_BLANK = "0" * 64
_END = re.compile(rb'"sha256": "([0-9a-f]{64})"\n\}\n')
_END_BYTES = len(f'"{_KEY}": "{_BLANK}"\n}}\n')


def with_hash(data: Mapping[str, Any]) -> str:
    """Returns the text of manifest.json that says this; a hash that is among the data is replaced."""
    said = {key: value for key, value in data.items() if key != _KEY}
    text = json.dumps({**said, _KEY: _BLANK}, indent=2) + "\n"
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
