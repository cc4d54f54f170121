"""Mutates valid inputs. The same seed and number give the same input, so that a failure can be reproduced."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

# Edges of what a byte, a word and a float hold.
_SMALL = (0, 1, -1, 2, 7, 127, 128, 255, 256, 4096, 65535)
_LARGE = (1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 32, 1 << 53, 1 << 62, (1 << 63) - 1, 1 << 63, -(1 << 63))
NUMBERS = (*_SMALL, *_LARGE)
_PATHS = ("..", "../x", "../../../../etc/passwd", "/etc/passwd", "C:\\x", "a/../../x", "~/x", "\\\\host\\x")
# What some reader might run or expand: C's formats, templates, YAML's tags and anchors, pickles.
_PROGRAMS = ("%s%n", "{{ ().__class__ }}", "!!python/object/apply:os.system ['true']", "cos\nsystem\n(S'true'\ntR.", "&a [*a]")
_WORDS = ("NaN", "1e999", "null", "é" * 300, "gguf", "f16")
TEXTS = ("", " ", "\0", *_PATHS, "x" * 5000, "\ud800", "\u202e", *_PROGRAMS, *_WORDS)
_OTHERS = (None, True, False, 0.5, -0.0, 1e308, float("inf"), float("nan"), [], {}, [[]], [None], {"": None}, [0] * 300)
VALUES: tuple[Any, ...] = (*NUMBERS, *TEXTS, *_OTHERS)
# Pieces that are not JSON values of their own but may stand in a text: of JSON, of any file, of YAML.
_JSON = (b"[" * 3000, b'{"a":' * 2000, b"9" * 5000, b"-")
_BYTES = (b"\xff\xfe", b"\xef\xbb\xbf", b"\0" * 64, b"1e99999", b'"\\ud800"')
RAW = (*_JSON, *_BYTES, b"*a", b"&a ", b"<<: ", b"!!binary ", b"\n---\n")


def input_of(
    seeds: Sequence[bytes],
    seed: int,
    number: int,
    *,
    structured: bool,
    focus: Sequence[tuple[int, int]] = (),
    by_meaning: Callable[[bytes, random.Random], bytes] | None = None,
) -> bytes:
    """Returns input `number` of a campaign. `structured`: the seeds are JSON, and most inputs still are. `focus`: where in the seeds to
    change bytes, most of the time; for seeds that share their layout. `by_meaning` makes nine of ten inputs."""
    chance = random.Random(f"{seed}:{number}")
    data = chance.choice(seeds)
    if by_meaning is not None and chance.random() < 0.9:
        return by_meaning(data, chance)
    if chance.random() < 0.01:
        return chance.randbytes(chance.randrange(200))
    if structured and chance.random() < 0.75:
        return _changed_json(data, chance)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        data = _changed_bytes(data, seeds, chance, focus)
    return data


def _changed_json(data: bytes, chance: random.Random) -> bytes:
    try:
        value = json.loads(data)
    except ValueError:
        return data
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        value = _changed(value, chance)
    text = json.dumps(value, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    if chance.random() < 0.05 and text.startswith(b"{"):  # a key that comes twice
        text = text[:-1] + b"," + text[1:]
    return text


def _changed(value: Any, chance: random.Random) -> Any:
    """Walks to a random place and puts something else there."""
    inside = isinstance(value, dict | list) and value and chance.random() < 0.85
    if not inside:
        if isinstance(value, int | float) and chance.random() < 0.4:
            return value + chance.choice((-1, 1)) if chance.random() < 0.5 else -value
        return chance.choice(VALUES)
    if isinstance(value, dict):
        key = chance.choice(list(value))
        act = chance.random()
        if act < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if act < 0.15:
            return {**value, chance.choice(TEXTS): chance.choice(VALUES)}
        if act < 0.2:
            return {**{k: v for k, v in value.items() if k != key}, chance.choice(TEXTS): value[key]}
        return {**value, key: _changed(value[key], chance)}
    index = chance.randrange(len(value))
    act = chance.random()
    if act < 0.1:
        return value[:index] + value[index + 1 :]
    if act < 0.2:
        return value[:index] + [value[index]] * chance.choice((2, 3, 50)) + value[index + 1 :]
    return [*value[:index], _changed(value[index], chance), *value[index + 1 :]]


def _changed_bytes(data: bytes, seeds: Sequence[bytes], chance: random.Random, focus: Sequence[tuple[int, int]]) -> bytes:
    at = _place(data, chance, focus)
    act = chance.randrange(9)
    if act == 0:  # a bit
        return data[:at] + bytes([(data[at : at + 1] or b"\0")[0] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    if act == 1:  # a byte
        return data[:at] + chance.randbytes(1) + data[at + 1 :]
    if act in (2, 3):  # a number, in its binary form
        width = chance.choice((1, 2, 4, 8))
        number = chance.choice((*NUMBERS, len(data), len(data) - at, chance.randrange(1 << 16)))
        return data[:at] + (number & (1 << 8 * width) - 1).to_bytes(width, "little") + data[at + width :]
    if act == 4:  # cut short
        return data[: chance.randrange(len(data) + 1)]
    if act == 5:  # a piece less
        return data[:at] + data[at + chance.choice((1, 2, 4, 8, 16, 100)) :]
    if act == 6:  # a piece twice
        end = at + chance.choice((1, 4, 8, 30, 100))
        return data[:end] + data[at:end] * chance.choice((1, 2, 50)) + data[end:]
    if act == 7:  # something foreign
        foreign = chance.choice((*RAW, *(text.encode("utf-8", "surrogatepass") for text in TEXTS)))
        return data[:at] + foreign + data[at + chance.choice((0, len(foreign))) :]
    other = chance.choice(seeds)
    cut = chance.randrange(len(other) + 1)
    return data[:at] + other[cut : cut + chance.choice((8, 64, 1000))] + data[at:]


def _place(data: bytes, chance: random.Random, focus: Sequence[tuple[int, int]]) -> int:
    if focus and chance.random() < 0.9:
        begin, end = chance.choice(focus)
        return min(chance.randrange(begin, max(end, begin + 1)), len(data))
    return chance.randrange(len(data) + 1)
