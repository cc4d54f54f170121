"""README.md's front matter and a model's name, read under limits for gguf's heuristics. The only module here that imports yaml.

gguf itself would read these files completely and expand every alias, so that a small hostile file could use all memory.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from edge_export.errors import CheckpointError
from edge_export.gguf.metadata import GENERATION_NAME

CARD_NAME = "README.md"
MAX_FRONT_MATTER = 256 << 10
_FENCE = "---"
# Evaluation results are nested about eight deep.
_MAX_DEPTH = 32
# gguf's split of a name into words takes time that grows with the square of its length.
_LONGEST_NAME = 4096


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml publishes no types
    """A SafeLoader that rejects aliases, which can make a small file huge, and deep nesting."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"line {self.peek_event().start_mark.line + 2}: aliases (*) are not allowed")
        if self.depth == _MAX_DEPTH:
            raise yaml.YAMLError(f"line {self.peek_event().start_mark.line + 2}: nested more than {_MAX_DEPTH} deep")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


@contextlib.contextmanager
def unfit_values(folder: Path) -> Iterator[None]:
    """Turns what gguf raises for values that fit no key into a CheckpointError; its heuristics do not check values."""
    try:
        yield
    except (struct.error, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        where = f"{folder}: {CARD_NAME}, {GENERATION_NAME}, config.json or the tokenizer"
        raise CheckpointError(f"{where} holds a value that no GGUF key can ({str(error)[:200]}); correct it") from error


def read_card(folder: Path) -> dict[str, Any]:
    """Returns the front matter of README.md, read as gguf reads it; empty where there is none. Raises CheckpointError."""
    path = folder / CARD_NAME
    if not path.is_file():
        return {}
    # The same two changes as gguf's: no is the Norwegian language, and tabs are spaces.
    text = _front_matter(path).replace("- no\n", '- "no"\n').replace("\t", "  ")
    try:
        data = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, LookupError, ArithmeticError, AttributeError, TypeError) as error:
        # Not only invalid YAML: also numbers of thousands of digits, impossible dates, tags that do not fit their value.
        raise CheckpointError(f"{path} has front matter that cannot be read ({' '.join(str(error).split())[:200]}); correct it") from error
    return data if isinstance(data, dict) else {}


def _front_matter(path: Path) -> str:
    """The lines between the first two fences. Reads no more than their limit."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_FRONT_MATTER)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}); check the checkpoint") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from error
    lines = text.splitlines()
    if not lines or lines[0] != _FENCE:
        return ""
    if _FENCE in lines[1:]:
        lines = lines[: lines.index(_FENCE, 1)]
    elif len(text) == MAX_FRONT_MATTER:
        raise CheckpointError(f"{path} has more than {MAX_FRONT_MATTER} characters of front matter; shorten it")
    return "\n".join(lines[1:]) + "\n"


def name_or_path(config: dict[str, Any], folder: Path) -> Any:
    """Returns `_name_or_path` of config.json, None if it has none. Raises CheckpointError if it is not a name."""
    name = config.get("_name_or_path")
    if name is not None and not (isinstance(name, str) and len(name) <= _LONGEST_NAME):
        raise CheckpointError(f"{folder / 'config.json'}: _name_or_path is not a name of at most {_LONGEST_NAME} characters; correct it")
    return name
