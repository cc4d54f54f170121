"""The state of a target besides its K/V rows, the same in all backends: its committed tokens, and the hidden rows of the newest ones.

It also checks the arguments of a target's methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge_runtime.errors import RequestError
from edge_runtime.interfaces import KvRows, Vocabulary, inside_image

# The tokens of this many forwards are written at once: each forward evicts the token array from the CPU's caches, and reaching it is slow.
_MAX_UNWRITTEN = 32
_NO_ROWS = np.empty((0, 0), dtype=np.float32)
Tokens = Sequence[int] | NDArray[np.int64]


class TokenRange(Vocabulary, Protocol):
    """A vocabulary of the ids 0 to `size` - 1."""

    size: int
    kept: dict[tuple[int, bool], bytes]  # pieces by (token, special); asking the library again right after a forward is slower

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Returns the bytes of one token, which may be a part of a character; control tokens are empty unless `special`."""
        piece = self.kept.get((token, special))
        if piece is None:
            self.check(token)
            piece = self.kept[token, special] = self._bytes_of(token, special=special)
        return piece

    def _bytes_of(self, token: int, *, special: bool) -> bytes:
        """Returns the bytes of a valid token from the library."""

    def check(self, token: int) -> None:
        """Raises RequestError for an id outside the vocabulary: a library may end the process for one."""
        if not 0 <= token < self.size:
            raise RequestError(f"token id {token} is not in the vocabulary of {self.size} tokens; check where it came from")


def well_formed(text: str) -> str:
    """Joins surrogate pairs and replaces lone surrogates, which have no UTF-8 form, by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class CommittedText(ABC):
    """The text whose rows are in a target's cache: `length` tokens, at most `context`. Base class of all targets."""

    row_bytes: tuple[int, int]
    sliding_rows: int

    def __init__(self, context: int, vocabulary: TokenRange, hidden_size: int, *, whole_rows: int = 0) -> None:
        """`whole_rows` is that of `interfaces.MediaTarget`."""
        self.context = context
        self.hidden_size = hidden_size
        self.whole_rows = whole_rows
        self.vocabulary = vocabulary
        self.length = 0
        self._tokens = np.zeros(context, np.int32)
        self._unwritten: list[tuple[int, Tokens]] = []  # (start, ids) of forwards that are not in `_tokens` yet
        self.forget_hidden()

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The committed tokens [length]. A view: a forward after a rollback overwrites its contents."""
        if self._unwritten:
            self._write()
        return self._tokens[: self.length]

    @property
    def hidden_row(self) -> NDArray[np.float32] | None:
        """The hidden row [hidden_size] of the last committed token, or None. A view that is valid until the next forward."""
        index = self.length - 1 - self._hidden_start
        return self._hidden[index] if 0 <= index < len(self._hidden) else None

    def check(self, tokens: Sequence[int]) -> None:
        """Raises RequestError unless the tokens fit the context and the vocabulary."""
        self.require_open()
        if not tokens:
            raise RequestError("there is no token to decode; give at least one")
        if self.length + len(tokens) > self.context:
            raise RequestError(f"{self.length} + {len(tokens)} tokens exceed the context of {self.context}; shorten the text or raise it")
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self.vocabulary.size:
            self.vocabulary.check(low if low < 0 else high)

    def checked(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        """Returns the ids as an array. Raises as `check` does."""
        self.check(tokens)
        return np.asarray(tokens, dtype=np.int64)

    def checked_soft(self, ids: Sequence[int], rows: NDArray[np.float32]) -> NDArray[np.int64]:
        """Returns the ids of soft rows [n, hidden size] as an array; raises RequestError unless they fit the context and are negative."""
        self.require_open()
        values = np.asarray(ids, dtype=np.int64)
        if self.length + len(values) > self.context:
            raise RequestError(f"{self.length} + {len(values)} rows exceed the context of {self.context}; shorten the text or raise it")
        if not len(values) or values.max() >= 0 or values.min() < np.iinfo(np.int32).min:
            raise RequestError("soft rows need at least one id, and all negative; take them from media_prompt")
        if rows.shape != (len(values), self.hidden_size):
            raise RequestError(f"soft rows have the shape {rows.shape}, not {(len(values), self.hidden_size)}; use this bundle's encoder")
        return values

    def check_rows(self, count: int, max_rows: int) -> None:
        """Raises RequestError for a verify of more than `max_rows` rows."""
        if count > max_rows:
            raise RequestError(f"{count} tokens are too many for one step; the model was opened for at most {max_rows}")

    def check_rollback(self, length: int) -> None:
        """Raises RequestError unless the cache can go back to `length` rows."""
        self.require_open()
        if not 0 <= length <= self.length:
            raise RequestError(f"cannot roll back to {length}: the cache holds {self.length} rows")
        if 0 < length < self.rollback_floor:
            raise RequestError(f"cannot roll back {self.length - length} rows to {length}: older rows are gone; compute the text again")
        if self.whole_rows and inside_image(self.tokens, length):
            raise RequestError(f"cannot roll back to {length}, inside of an image whose rows attend to later ones; go to its beginning")

    def check_state(self, tokens: Sequence[int], rows: KvRows) -> None:
        """Raises RequestError unless the number and size of `rows` are right for a text of `tokens`."""
        self.require_open()
        length, (full, sliding) = len(tokens), self.row_bytes
        if not 0 < length <= self.context:
            raise RequestError(f"a state of {length} tokens does not fit the context of {self.context}; raise it")
        sizes = (*rows.full.shape, rows.sliding.shape[1])
        if sizes != (length, full, sliding) or not min(length, self.sliding_rows) <= len(rows.sliding) <= length:
            raise RequestError(f"the KV state has {sizes} rows and bytes, {len(rows.sliding)} sliding; they do not fit this target")

    def append(self, ids: Tokens) -> None:
        """Records tokens whose rows are in the cache."""
        self._unwritten.append((self.length, ids))
        self.length += len(ids)
        if max(len(ids), len(self._unwritten)) >= _MAX_UNWRITTEN:
            self._write()

    def _write(self) -> None:
        forwards, self._unwritten = self._unwritten, []
        for start, ids in forwards:  # tokens that were rolled back are overwritten by those of later forwards
            self._tokens[start : start + len(ids)] = ids

    def take_hidden(self, rows: NDArray[np.float32]) -> None:
        """Keeps a view of the hidden rows [n, hidden_size] of the newest n tokens."""
        self._hidden_start = self.length - len(rows)
        self._hidden = rows

    def forget_hidden(self) -> None:
        """Releases the hidden rows."""
        self._hidden_start = 0
        self._hidden = _NO_ROWS

    @property
    @abstractmethod
    def rollback_floor(self) -> int:
        """The smallest length above 0 that a rollback accepts."""

    @abstractmethod
    def require_open(self) -> None:
        """Raises RequestError if the target is closed."""
