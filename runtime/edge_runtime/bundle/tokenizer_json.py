"""Checks a tokenizer.json before the tokenizers library parses it, and its components before they run on prompts.

Only the components of Gemma's tokenizers are allowed. Others can take unlimited time (most regular expressions), lengthen a prompt without
limit, or make the library panic.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge_devices.errors import errors_as
from edge_runtime.bundle.bundle import read_part
from edge_runtime.errors import BundleError

# Gemma's files have 33 MB.
MAX_TOKENIZER_BYTES = 256 << 20
_KINDS = {
    "normalizer": {"Replace"},
    "pre_tokenizer": {"Split"},
    "post_processor": {"TemplateProcessing"},
    "decoder": {"Replace", "ByteFallback", "Fuse"},
    "model": {"BPE"},
}
_PATTERNED = ("Replace", "Split")
_LISTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors", "decoder": "decoders"}
_ALL_KINDS = frozenset(kind.encode() for kinds in _KINDS.values() for kind in kinds) | {b"Sequence"}
# Finds the types of components. A vocabulary may have a token "type" too, but its value is a number.
_KIND = re.compile(rb'"type"\s*:\s*"([^"]*)"')
_MAX_PARTS, _MAX_PART_BYTES = 8, 1 << 16
# Matches regular expressions that take linear time, because they never backtrack: each alternative is one character or character class,
# with or without +. One example is llama.cpp's own rule for Gemma 4, [^\\n]+|[\\n]+ (src/llama-vocab.cpp).
_CHARACTER = r"(?:\\[nrtsSdDwW]|[^\\\[\](){}.*+?|^$&-])"
_ATOM = rf"(?:\[\^?(?:{_CHARACTER}|(?<=\w)-\w)+\]|{_CHARACTER})\+?"
_LINEAR = re.compile(rf"{_ATOM}(?:\|{_ATOM})*")
# The most by which a prompt may grow in bytes. Gemma's tokenizers need a factor of 3: a space becomes the three bytes of U+2581.
_MAX_GROWTH = 8


def read_tokenizer(path: Path) -> bytes:
    """Returns the file's bytes. Raises BundleError if it is too large, or names a component that Gemma's tokenizers do not have."""
    data = read_part(path, MAX_TOKENIZER_BYTES, "tokenizer")
    for match in _KIND.finditer(data):
        if match.group(1) not in _ALL_KINDS:
            raise _foreign(path, match.group(1)[:40].decode("utf-8", "replace"))
    return data


def check_parts(tokenizer: Any, path: Path) -> None:
    """Raises BundleError unless all components of a loaded tokenizer are those of Gemma's tokenizers, and within limits."""
    if type(tokenizer.model).__name__ not in _KINDS["model"]:
        raise _foreign(path, type(tokenizer.model).__name__)
    for place in _LISTS:
        part = getattr(tokenizer, place)
        if part is not None:
            _check_part(place, part.__getstate__(), path)


def check_file(path: Path) -> None:
    """Checks a tokenizer.json as `read_tokenizer` and `check_parts` do, without the tokenizers library. Raises BundleError."""
    with errors_as(BundleError, f"{path} is not JSON", "take the tokenizer.json of the checkpoint", ValueError, RecursionError):
        tokenizer = json.loads(read_tokenizer(path))
    if not isinstance(tokenizer, dict):
        raise BundleError(f"{path} is not a JSON object; take the tokenizer.json of the checkpoint")
    for place in _LISTS:
        part = tokenizer.get(place)
        if part is not None:
            try:
                _check_part(place, json.dumps(part).encode(), path)
            except (KeyError, TypeError, AttributeError) as error:
                raise BundleError(f"{path}: the tokenizer's {place} is malformed; take the tokenizer.json of the checkpoint") from error


def _check_part(place: str, state: bytes, path: Path) -> None:
    if len(state) > _MAX_PART_BYTES:
        raise BundleError(
            f"{path}: the tokenizer's {place} has {len(state)} bytes, at most {_MAX_PART_BYTES} are read; copy the bundle again"
        )
    parts = list(_flat(json.loads(state), _LISTS[place]))
    growth = 1.0
    for part in parts:
        if part["type"] not in _KINDS[place]:
            raise _foreign(path, str(part["type"])[:40])
        if part["type"] in _PATTERNED:
            growth *= _growth(part, path)
    if len(parts) > _MAX_PARTS or growth > _MAX_GROWTH:
        raise BundleError(
            f"{path}: the tokenizer's {place} has {len(parts)} components and makes a text up to {growth:.3g} times as long, "
            f"at most {_MAX_PARTS} and {_MAX_GROWTH} are run; take the tokenizer.json of the checkpoint"
        )


def _flat(part: dict[str, Any], inner: str) -> Iterator[dict[str, Any]]:
    if part["type"] != "Sequence":
        yield part
        return
    for child in part[inner]:
        yield from _flat(child, inner)


def _growth(part: dict[str, Any], path: Path) -> float:
    """Returns the largest factor by which a component lengthens a text.

    Raises BundleError unless its pattern is a plain text, or in a Split a regular expression that takes linear time.
    """
    pattern = part["pattern"].get("String")
    if not pattern:
        expression = part["pattern"].get("Regex")
        if part["type"] == "Split" and isinstance(expression, str) and _LINEAR.fullmatch(expression):
            return 1.0
        raise _foreign(path, f"{part['type']} by a regular expression or by nothing")
    return max(1.0, len(part.get("content", "").encode()) / len(pattern.encode()))


def _foreign(path: Path, kind: str) -> BundleError:
    return BundleError(
        f"{path} has the component {kind!r}, which Gemma's tokenizers do not have; take the tokenizer.json of the checkpoint"
    )
