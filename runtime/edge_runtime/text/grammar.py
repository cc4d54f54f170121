"""Constraints enforced by llguidance, which computes the tokens that a grammar allows.

A grammar from outside can take minutes and gigabytes at any step, so its matcher is in a child process with limits (`children`)."""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_devices.fork_host import Host
from edge_devices.machine.device_package import how_to_get
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.interfaces import Vocabulary
from edge_runtime.text import matcher as matchers
from edge_runtime.text.constraints import (
    THOUGHTS_BEGIN,
    THOUGHTS_END,
    AfterThoughts,
    ConstraintSource,
    Gbnf,
    JsonSchema,
    ToolCalls,
    check_size,
    read_grammar,
    read_schema,
)
from edge_runtime.text.matcher import Matcher
from edge_runtime.text.tool_grammar import tool_call_grammar

# Tokens that begin with this byte are special to llguidance. It does not occur in UTF-8 text.
_MARKER = b"\xff"
# Allows all tokens that spell valid text, not only those that the tokenizer would choose.
_HEADER = '%llguidance {"no_forcing": true}\n'
# One space, or line breaks and an indentation, so that a model cannot emit blanks forever. A schema's "x-guidance" overrides this.
_BLANK = r"\x20|\x0A{1,2}[\x20\x09]{0,40}"
# With this slice, the library handles all tokens inside a JSON string as one set. A mask there takes 0.2 ms instead of 3.5 ms, for 28 MiB
# with 262144 tokens. The library's default of four slices takes 86 MiB and is faster only in strings of limited length.
_STRING = r'[^"\\\x00-\x1F\x7F]+'
_FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
# Keywords whose values are plain JSON, not schemas.
_VALUES = {"const", "default", "enum", "examples"}
_MAX_REASON = 300
_NOTHING_FOLLOWS = "NoExtensionBias"


class Grammars:
    """Compiles constraints for one vocabulary of `size` tokens. The token table is built once (0.7 s for 262144 tokens)."""

    def __init__(self, vocabulary: Vocabulary, size: int) -> None:
        """Raises BackendError if llguidance is not installed, RequestError for a vocabulary without an end token."""
        try:
            self._library = matchers.llguidance_module()
        except ImportError as error:
            raise BackendError(f"constrained output needs llguidance, which is not installed; {how_to_get('grammar')}") from error
        if not vocabulary.eog_tokens:
            raise RequestError("the vocabulary has no end token, so no grammar could end; leave the constraint out")
        self._eog = vocabulary.eog_tokens
        self._control = vocabulary.control_tokens
        self._size = size
        pieces, ends = _pieces(vocabulary, size), sorted(vocabulary.eog_tokens)
        self._host = Host(matchers.__name__, matchers.packed_setup(pieces, ends, [_STRING]), BackendError)

    def constrain(self, source: ConstraintSource) -> Constraint:
        """Returns a constraint in its initial state. Raises RequestError with the library's reason if it cannot be compiled."""
        constraint = Constraint(Matcher(self._host, _HEADER + self._lark(source)), self._eog, self._size)
        constraint.allowed(())  # raises for a grammar that allows no text
        return constraint

    def _lark(self, source: ConstraintSource) -> str:
        """Returns the grammar in the library's dialect of Lark."""
        if isinstance(source, AfterThoughts):
            return self._behind_thoughts(self._lark(source.answer), opened=source.opened)
        if isinstance(source, JsonSchema):
            return f"start: {_json_rule(source)}"
        if isinstance(source, Gbnf):
            return matchers.lark_from_gbnf(read_grammar(source.text))
        if isinstance(source, ToolCalls):
            calls = tool_call_grammar(source, self._control)
            return calls if source.answer is None else f"{calls}answer: {_json_rule(source.answer)}\n"
        check_size("the regular expression", source.pattern)
        return f"start: /{self._library.regex_to_lark(source.pattern, '')}/"

    def _behind_thoughts(self, answer: str, *, opened: bool) -> str:
        """Returns the grammar of an answer after thoughts, which may have any tokens except control tokens."""
        begin, end = (self._control.get(mark) for mark in (THOUGHTS_BEGIN, THOUGHTS_END))
        if begin is None or end is None:
            return answer
        start = "thoughts answer" if opened else f"(<[{begin}]> thoughts)? answer"
        closed = ",".join(map(str, sorted(self._eog.union(self._control.values()))))
        return f"start: {start}\nthoughts: <[^{closed}]>* <[{end}]>\nanswer: %lark {{\n{answer}\n}}\n"


def _json_rule(source: JsonSchema) -> str:
    return f"%json {json.dumps(_prepared(read_schema(source.schema)))}"


_made: weakref.WeakKeyDictionary[Vocabulary, Grammars] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def grammars_for(vocabulary: Vocabulary, size: int) -> Grammars:
    """Returns the `Grammars` of a vocabulary, created on first use. All sessions on a model share them."""
    with _making:
        if vocabulary not in _made:
            _made[vocabulary] = Grammars(vocabulary, size)
        return _made[vocabulary]


def _pieces(vocabulary: Vocabulary, size: int) -> list[bytes]:
    """Returns the text of each token. A token with an empty text is never allowed.

    Control tokens get an empty text even if they have one, because inside a JSON string such a token would begin a tool call.
    """
    control = vocabulary.eog_tokens.union(vocabulary.control_tokens.values())
    return [b"" if token in control else _text(vocabulary.piece(token)) for token in range(size)]


class Constraint:
    """The constraint of one request, in the state after its emitted tokens. Queries about drafts (`ahead`) do not change that state.

    An end token is allowed exactly where the text is complete. Where no text can follow, only end tokens are allowed. The matcher is in the
    state after the emitted tokens and the drafts in `_path`.
    """

    def __init__(self, matcher: Matcher, eog: frozenset[int], size: int) -> None:
        self._matcher = matcher
        self._eog = eog
        self._size = size
        self._ended = False
        self._path: list[int] = []
        self._masks: list[NDArray[np.bool_] | None] = [None]
        self._check()

    def allowed(self, ahead: Sequence[int]) -> NDArray[np.bool_]:
        """Returns which tokens may follow the emitted tokens and `ahead`, bool [vocabulary]; repeated calls return the same array."""
        if self._over(ahead):
            return self._ends_only()
        place = len(ahead)
        if list(ahead) != self._path[:place] or (mask := self._masks[place]) is None:
            self._go_to(ahead)
            bits = self._matcher.compute_bitmask()
            self._check()
            mask = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[: self._size].view(np.bool_)
            self._masks[place] = mask
        return mask

    def allows(self, ahead: Sequence[int], token: int) -> bool:
        """Whether `token` may follow `ahead`. Gives the same result as `allowed`, but much faster."""
        place = len(ahead)
        if self._over(ahead) or (list(ahead) == self._path[:place] and self._masks[place] is not None):
            return bool(self.allowed(ahead)[token])
        self._go_to(ahead)
        if self._matcher.is_stopped():
            return token in self._eog
        return self._matcher.validate_tokens([token]) == 1

    def closed(self, ahead: Sequence[int]) -> bool:
        """Whether no text can follow `ahead`. Drafts end there, and so does the request."""
        if self._over(ahead):
            return True
        self._go_to(ahead)
        return self._matcher.is_stopped()

    def valid(self, drafts: Sequence[int]) -> int:
        """Returns how many of `drafts`, from the first on, may follow the emitted tokens."""
        if self._ended:
            return 0
        self._go_to(())
        return self._matcher.validate_tokens(list(drafts))

    def advance(self, token: int) -> bool:
        """Adds an emitted token; returns whether no text can follow it. Keeps states and masks if the drafts begin with this token."""
        if self._over((token,)):
            self._ended = True
            return True
        if self._path[:1] != [token]:
            self._go_to((token,))
        del self._path[0], self._masks[0]
        if self._path:
            return False
        return self._matcher.is_stopped()

    @property
    def complete(self) -> bool:
        """Whether the emitted text is complete, so that it could end here."""
        if self._ended:
            return True
        self._go_to(())
        return self._matcher.is_accepting()

    def _over(self, ahead: Sequence[int]) -> bool:
        return self._ended or not self._eog.isdisjoint(ahead)

    def _ends_only(self) -> NDArray[np.bool_]:
        mask = np.zeros(self._size, np.bool_)
        mask[sorted(self._eog)] = True
        return mask

    def _go_to(self, ahead: Sequence[int]) -> None:
        """Moves the matcher to the state after `ahead`. Raises RequestError if one of its tokens is invalid, or the library fails."""
        path, ahead = self._path, list(ahead)
        common = next((i for i, (old, new) in enumerate(zip(path, ahead, strict=False)) if old != new), min(len(path), len(ahead)))
        if len(path) > common:
            self._matcher.rollback(len(path) - common)
            del path[common:], self._masks[common + 1 :]
        if len(ahead) > common:
            self._matcher.consume_tokens(ahead[common:])
            path += ahead[common:]
            self._masks += [None] * (len(ahead) - common)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"the grammar cannot be used: {_reason(self._matcher.get_error())}")


def _text(piece: bytes) -> bytes:
    return b"" if piece.startswith(_MARKER) else piece


def _prepared(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    """Returns a schema with defaults for the library: blanks are limited, and oneOf is treated as anyOf, since it allows the same texts."""
    if schema is False:
        return False
    schema = {} if schema is True else _with_known_formats(schema)
    guidance = schema.get("x-guidance", {})
    if not isinstance(guidance, dict):
        return schema
    blanks = {} if "whitespace_flexible" in guidance else {"whitespace_pattern": _BLANK}
    return schema | {"x-guidance": {"coerce_one_of": True} | blanks | guidance}


def _with_known_formats(schema: Any) -> Any:
    """Returns a schema without formats that the library does not know. JSON Schema says to ignore them."""
    if isinstance(schema, list):
        return [_with_known_formats(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "format" or not isinstance(value, str) or value in _FORMATS}
    return {key: value if key in _VALUES else _with_known_formats(value) for key, value in kept.items()}


def _reason(error: str) -> str:
    """Returns the library's message as one line, without its excerpt of the converted grammar."""
    if error.startswith(_NOTHING_FOLLOWS):
        return "no text that it allows can be written with this vocabulary"
    lines = [line.strip() for line in error.splitlines() if not re.match(r"\s*(\d+ \||\^)", line)]
    text = re.sub(r"^at \d+\(\d+\): ", "", " ".join(line for line in lines if line and line != "<non-verbose/>"))
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + "..."
