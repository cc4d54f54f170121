"""A draft store: texts on the disk, only where the user asks for one: earlier answers and files, from which later requests copy drafts.

The file is text: a first line that names the format, then a JSON string a line, oldest first. It is its owner's alone (mode 0600). A file
that is something else is neither used nor changed.

It is written in place, under a lock on the file itself, and no copy of it ever lies elsewhere. So removing the file forgets all of it, by
whatever means and at whatever moment: what a process writes then goes to the file that is gone, or to a new one that begins empty. A
process that is killed while it writes leaves at most lines that are no text, which are skipped.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from edge_devices.errors import errors_as
from edge_devices.files.limited_read import read_regular
from edge_devices.files.temp_files import clear_stale, lock_open
from edge_devices.files.user_cache import is_own
from edge_runtime.drafting.sources import Guess
from edge_runtime.drafting.text_memory import BORDER, LEAD, SHORTEST_MATCH, TEXT_PRIORS, Place, SuffixAutomaton, evidence
from edge_runtime.drafting.text_memory import SOURCE as TEXT_SOURCE
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import Vocabulary

SOURCE = "stored"
# A match in another text says a little less than one in the same text.
STORE_PRIORS = {key.replace(TEXT_SOURCE, SOURCE): 0.9 * chance for key, chance in TEXT_PRIORS.items()}
HEADER = "edge-mtp memory 1"
_START = f"{HEADER}\n".encode()
# Writing takes milliseconds. A process that was stopped meanwhile keeps the lock and leaves the file as it is; while others write, it
# changes.
STILL_SECONDS, BUSY_SECONDS = 0.2, 10.0
STORE_SIZE = "1MB"
# The most that a limit may be: all of it is read.
MAX_STORE_BYTES = 64 << 20
# Tokens of the newest texts that are held.
MAX_TOKENS = 1 << 16


class DraftStore:
    """The texts of a draft store's file, as an automaton that all requests of a model share. May be used from any thread."""

    def __init__(self, path: Path, vocabulary: Vocabulary, *, limit: int, notify: Callable[[str], None] = lambda _: None) -> None:
        """`limit` in bytes. A file that is not of this kind or not private is reported by `notify`, and left alone.

        Raises RequestError for a limit out of range.
        """
        if not 1 << 10 <= limit <= MAX_STORE_BYTES:
            raise RequestError(f"the draft store's limit is {limit} bytes; give {1 << 10} to {MAX_STORE_BYTES}")
        self._path, self._vocabulary, self._limit, self._notify = path, vocabulary, limit, notify
        self._automaton = SuffixAutomaton()
        self._lock = threading.Lock()
        self._patience = STILL_SECONDS  # none while a process that holds the lock was waited for
        self.usable = True
        self._texts: list[str] = []
        self._stamp: tuple[int, ...] | None = ()  # of no file
        self._refresh()
        if self.usable:
            clear_stale(path)  # earlier versions wrote copies, which killed processes left

    def __len__(self) -> int:
        return len(self._texts)

    def remember(self, text: str) -> None:
        """Adds a text, unless it is there already; the oldest texts make room.

        While a process that does not write holds the lock, nothing is added, which is reported once.
        """
        with self._lock:
            self._refresh()
            if not self._is_new(text):
                return
            try:
                with _locked(self._path, self._patience) as file:
                    self._patience = STILL_SECONDS
                    self._refresh()
                    if not self._is_new(text):
                        return
                    self._texts.append(text)
                    if _append(file, text) > self._limit:
                        self._texts = _newest(self._texts, self._limit // 2 - len(_START))  # so that not each text drops some
                        _shorten(file, self._texts)
                    self._stamp = _version(os.fstat(file.fileno()))
                self._learn_more([text])
            except BlockingIOError:
                if self._patience:
                    self._notify(f"another process holds the draft store {self._path}; until it lets go, nothing more is remembered")
                self._patience = 0.0
            except OSError as error:
                self.usable = False
                self._notify(f"the draft store {self._path} cannot be written ({error.strerror or error}); nothing more is remembered")

    def _is_new(self, text: str) -> bool:
        return self.usable and bool(text.strip()) and text not in self._texts and len(text.encode("utf-8", "replace")) <= self._limit // 2

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
        if len(self._automaton.tokens) > 2 * MAX_TOKENS:
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
            if tokens > MAX_TOKENS:
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

    def guess(self, ahead: Sequence[int], limit: int) -> Guess:
        with self._lock:
            place = self._followed(ahead)
            copy = self._automaton.copied(place, limit) if place.length >= SHORTEST_MATCH else []
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
    if not is_own(state):
        raise RequestError(f"the draft store {path} belongs to another user (number {state.st_uid}); name a file of your own")
    if os.name == "posix" and mode & 0o077:
        raise RequestError(f"the draft store {path} may be read by others (mode {mode:o}); chmod 600 it if it is yours")
    with errors_as(RequestError, f"the draft store {path} cannot be read", "name another file"):
        data = read_regular(path, 2 * MAX_STORE_BYTES)
    if not data.startswith(_START[: len(data)]):
        raise RequestError(f"{path} is no draft store of edge-mtp (its first line is not {HEADER!r})")
    texts = [text for line in data[len(_START) :].split(b"\n") if (text := _text_of(line)) is not None]
    return list(dict.fromkeys(reversed(texts)))[::-1]


def forget_store(path: Path) -> int:
    """Removes a draft store; returns how many texts it held. Raises RequestError for a file that is none, or cannot be removed."""
    texts = len(read_store(path))
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise RequestError(f"the draft store {path} cannot be removed ({error.strerror or error})") from error
    return texts


def _text_of(line: bytes) -> str | None:
    """Returns the text of a line; None for what a killed process left, or another program wrote."""
    try:
        text = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return text if isinstance(text, str) else None


@contextlib.contextmanager
def _locked(path: Path, patience: float) -> Iterator[BinaryIO]:
    """Opens a draft store, made if it is missing, while no other process writes it.

    Raises BlockingIOError if another has the lock and has not written for `patience` seconds, OSError.

    A file that was removed or replaced before the lock was got is the store no more: the next one is opened.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    end = time.monotonic() + BUSY_SECONDS
    while True:
        with os.fdopen(os.open(path, flags, 0o600), "r+b") as file:
            before = os.fstat(file.fileno())
            try:
                lock_open(file.fileno(), patience)
            except BlockingIOError:
                if _version(os.fstat(file.fileno())) == _version(before) or time.monotonic() > end:
                    raise
                continue
            if _is_at(file, path):
                yield file
                return


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False


def _append(file: BinaryIO, text: str) -> int:
    """Adds a text to an open draft store, behind what a killed process left. Returns how long the file is then. Raises OSError."""
    size = file.seek(0, os.SEEK_END)
    if size < len(_START):
        file.seek(0)
        file.write(_START)
    else:
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.write(b"\n")
    file.write(_line(text))
    file.flush()
    return file.tell()


def _shorten(file: BinaryIO, texts: Sequence[str]) -> None:
    """Leaves only the newest texts, which take less than half of the file, in an open draft store. Raises OSError.

    They are copied to the beginning first: whenever this ends, each of them is there.
    """
    file.seek(len(_START))
    file.write(b"".join(map(_line, texts)))
    file.flush()
    os.fsync(file.fileno())
    file.truncate()


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Returns what changes with each version of a file; None if there is none."""
    try:
        return _version(path.lstat())
    except (OSError, ValueError):
        return None


def _version(state: os.stat_result) -> tuple[int, ...]:
    return state.st_ino, state.st_size, state.st_mtime_ns, state.st_mode, state.st_uid


def _newest(texts: Sequence[str], limit: int) -> list[str]:
    """Returns the newest texts that take at most `limit` bytes together."""
    totals = itertools.accumulate(map(_bytes, reversed(texts)))
    count = sum(total <= limit for total in totals)
    return list(texts[len(texts) - count :])


def _bytes(text: str) -> int:
    return len(_line(text))


def _line(text: str) -> bytes:
    return f"{json.dumps(text)}\n".encode()
