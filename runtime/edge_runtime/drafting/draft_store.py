"""A draft store: texts on the disk, only where the user asks for one: earlier answers and files, from which later requests copy drafts.

The file is text: a first line that names the format, then a JSON string a line, oldest first. It is its owner's alone (mode 0600). A file
that is something else is neither used nor changed.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from edge_devices.files.atomic_write import atomic_write
from edge_devices.files.limited_read import FileTooLarge, read_at_most, read_regular
from edge_runtime.drafting.sources import Guess
from edge_runtime.drafting.text_memory import BORDER, LEAD, SHORTEST_MATCH, TEXT_PRIORS, Place, SuffixAutomaton, evidence
from edge_runtime.drafting.text_memory import SOURCE as TEXT_SOURCE
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import Vocabulary

SOURCE = "stored"
# A match in another text says a little less than one in the same text.
STORE_PRIORS = {key.replace(TEXT_SOURCE, SOURCE): 0.9 * chance for key, chance in TEXT_PRIORS.items()}
HEADER = "edge-mtp memory 1"
STORE_SIZE = "1MB"
# The most that a limit may be: all of it is read.
MOST_STORE_BYTES = 64 << 20
# Tokens of the newest texts that are held.
MOST_TOKENS = 1 << 16


class DraftStore:
    """The texts of a draft store's file, as an automaton that all requests of a model share. May be used from any thread."""

    def __init__(self, path: Path, vocabulary: Vocabulary, *, limit: int, notify: Callable[[str], None] = lambda _: None) -> None:
        """`limit` in bytes. A file that is not of this kind or not private is reported by `notify`, and left alone.

        Raises RequestError for a limit out of range.
        """
        if not 1 << 10 <= limit <= MOST_STORE_BYTES:
            raise RequestError(f"the draft store's limit is {limit} bytes; give {1 << 10} to {MOST_STORE_BYTES}")
        self._path, self._vocabulary, self._limit, self._notify = path, vocabulary, limit, notify
        self._automaton = SuffixAutomaton()
        self._lock = threading.Lock()
        self.usable = True
        self._texts: list[str] = []
        self._stamp: tuple[int, ...] | None = ()  # of no file
        self._refresh()

    def __len__(self) -> int:
        return len(self._texts)

    def remember(self, text: str) -> None:
        """Adds a text, unless it is there already; the oldest texts make room."""
        with self._lock:
            self._refresh()
            if not self.usable or not text.strip() or text in self._texts or len(text.encode("utf-8", "replace")) > self._limit // 2:
                return
            self._texts.append(text)
            if sum(map(_bytes, self._texts)) > self._limit:
                self._texts = _newest(self._texts, self._limit // 2)  # so that not each text drops some
            self._learn_more([text])
            try:
                write_store(self._path, self._texts)
                self._stamp = _stamp(self._path)
            except OSError as error:
                self.usable = False
                self._notify(f"the draft store {self._path} cannot be written ({error.strerror or error}); nothing more is remembered")

    def remember_file(self, path: Path) -> None:
        """Adds a text file. Raises RequestError if it cannot be read, is not UTF-8 text, or takes more than half of the limit."""
        try:
            text = read_at_most(path, self._limit // 2).decode("utf-8")
        except FileTooLarge as error:
            raise RequestError(f"{path} is too large to remember ({error}); raise the store's limit of {self._limit} bytes") from error
        except (OSError, ValueError) as error:
            raise RequestError(f"{path} cannot be remembered ({error}); give a text file") from error
        self.remember(text)

    def source(self, prompt: Sequence[int]) -> DraftStoreSource:
        """Returns the source of a request."""
        with self._lock:
            self._refresh()
            automaton = self._automaton
        return DraftStoreSource(automaton, self._lock, prompt)

    def _refresh(self) -> None:
        """Takes over what became of the file since: it was forgotten, or another process wrote. The caller holds the lock."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp, before = stamp, self._texts
        try:
            self._texts = read_store(self._path)
        except RequestError as error:
            self._texts, self.usable = [], False
            self._notify(f"{error}; it is not used and not changed")
        if before and self._texts[: len(before)] == before:
            self._learn_more(self._texts[len(before) :])
        else:
            self._relearn()

    def _learn_more(self, texts: Sequence[str]) -> None:
        for text in texts:
            self._learn(text)
        if len(self._automaton.tokens) > 2 * MOST_TOKENS:
            self._relearn()

    def _learn(self, text: str) -> None:
        for token in (*self._vocabulary.encode(text, add_bos=False), BORDER):
            self._automaton.append(token)

    def _relearn(self) -> None:
        """Begins a new automaton with the newest texts, as many as are held. Running requests keep the old one."""
        self._automaton = SuffixAutomaton()
        kept, tokens = [], 0
        for text in reversed(self._texts):
            tokens += len(self._vocabulary.encode(text, add_bos=False)) + 1
            if tokens > MOST_TOKENS:
                break
            kept.append(text)
        for text in reversed(kept):
            self._learn(text)


class DraftStoreSource:
    """Implements `sources.Source`: where the newest tokens of one request are in a draft store."""

    def __init__(self, automaton: SuffixAutomaton, lock: threading.Lock, prompt: Sequence[int]) -> None:
        self._automaton, self._lock = automaton, lock
        self._place = Place(0, 0)
        self.add(prompt[-LEAD:])

    def guess(self, ahead: Sequence[int], most: int) -> Guess:
        with self._lock:
            place = self._followed(ahead)
            copy = self._automaton.copied(place, most) if place.length >= SHORTEST_MATCH else []
        return Guess(SOURCE, tuple(copy), tuple(evidence(place.length + index, SOURCE) for index in range(len(copy))))

    def add(self, tokens: Sequence[int]) -> None:
        with self._lock:
            self._place = self._followed(tokens)

    def _followed(self, tokens: Sequence[int]) -> Place:
        place = self._place
        for token in tokens:
            place = self._automaton.follow(place, token)
        return place


def read_store(path: Path) -> list[str]:
    """Returns the texts of a draft store, none if there is no file. Raises RequestError if it is none, or if others may read it."""
    try:
        state = path.lstat()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise RequestError(f"the draft store {path} cannot be read ({error})") from error
    mode = stat.S_IMODE(state.st_mode)
    if os.name == "posix" and mode & 0o077:
        raise RequestError(f"the draft store {path} may be read by others (mode {mode:o}); chmod 600 it if it is yours")
    try:
        lines = read_regular(path, 2 * MOST_STORE_BYTES).decode("utf-8").split("\n")
        if lines[0] != HEADER or lines[-1]:
            raise ValueError(f"its first line is not {HEADER!r}" if lines[0] != HEADER else "its end is missing")
        texts = [json.loads(line) for line in lines[1:-1]]
    except FileTooLarge as error:
        raise RequestError(f"{path} is no draft store of edge-mtp ({error})") from error
    except OSError as error:
        raise RequestError(f"the draft store {path} cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is no draft store of edge-mtp ({error})") from error
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{path} is no draft store of edge-mtp (a line is not a text)")
    return texts


def write_store(path: Path, texts: Sequence[str]) -> None:
    """Replaces a draft store's file. Raises OSError."""
    data = "".join(f"{line}\n" for line in (HEADER, *map(json.dumps, texts)))
    atomic_write(path, [data.encode()])


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Returns what changes with each version of a file; None if there is none."""
    try:
        state = path.lstat()
    except (OSError, ValueError):
        return None
    return state.st_ino, state.st_size, state.st_mtime_ns, state.st_mode


def _newest(texts: Sequence[str], limit: int) -> list[str]:
    """Returns the newest texts that take at most `limit` bytes together."""
    totals = itertools.accumulate(map(_bytes, reversed(texts)))
    count = sum(total <= limit for total in totals)
    return list(texts[len(texts) - count :])


def _bytes(text: str) -> int:
    return len(json.dumps(text)) + 1
