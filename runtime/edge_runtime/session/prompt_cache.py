"""The prompt cache: K/V rows of prompts in a folder, so that a text is computed once.

The folder holds segments: files with the rows of a run of tokens. A segment's name has a hash of the text before it and a hash of the text
up to its end. Both hashes include the facts that the rows depend on and the client. So the longest known prefix of a prompt follows from
file names alone, texts with the same beginning share segments, and another bundle, engine or client does not find them. Segments are the
pieces in which prompts are prefilled. What follows a restored segment is therefore computed in the same pieces as without the cache.

Reading is given up when it takes more than a `SPEEDUP`-th of the time that computing took. No failure here fails a request: what cannot be
read is computed, what cannot be written is not kept, and `notify` gets one sentence.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
import os
import queue
import re
import stat
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edge_devices.errors import errors_as
from edge_devices.files.atomic_write import atomic_write, clear_stale_in
from edge_devices.files.limited_read import READ_FLAGS
from edge_devices.files.typed_json import StructureError, from_json, to_json
from edge_devices.files.user_cache import CacheFiles, cache_folder, is_own
from edge_runtime.errors import EdgeRuntimeError, RequestError
from edge_runtime.interfaces import KvRows, MediaTarget, SavableTarget, inside_image

MAGIC = b"EDGEMTPS"
VERSION = 2
MAX_HEADER_BYTES = 4096
MAX_SECONDS = 1e9
TOKEN = np.dtype("<i4")
# The facts that rows depend on, each with its wording in an error.
FACTS = {
    "bundle": "another bundle",
    "engine": "another engine",
    "kv_type": "another K/V type",
    "rows": "another cache layout",
    "kernels": "other kernels, another version or another processor",
}


@dataclass(frozen=True, kw_only=True)
class StateHeader:
    """What a file holds. `facts` has the keys of FACTS. `after` is a hash of the facts, the client and the `first` tokens before these.

    `tokens` is the number of tokens and of rows of full attention, `sliding` the number of rows of sliding layers. `tokens_sha256` covers
    tokens and full rows, `sliding_sha256` the sliding rows. `seconds` is how long computing the rows took.
    """

    version: int
    facts: Mapping[str, str]
    context: int
    first: int
    after: str
    tokens: int
    sliding: int
    tokens_sha256: str
    sliding_sha256: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RowSegment:
    """Rows with their tokens [n]. `first`, `after` and `seconds` are as in `StateHeader`."""

    tokens: NDArray[np.int64]
    rows: KvRows
    first: int = 0
    after: str = ""
    seconds: float = 0.0


def row_facts(target: SavableTarget, bundle: str, engine: str, kernels: str) -> dict[str, str]:
    """Returns the facts that a target's rows depend on; `bundle` and `kernels` are hashes."""
    full, sliding = target.row_bytes
    return {"bundle": bundle, "engine": engine, "kv_type": target.kv_type, "rows": f"{full}+{sliding}", "kernels": kernels}


def write_segment(path: Path, segment: RowSegment, facts: Mapping[str, str], context: int) -> int:
    """Writes a file atomically, readable by its owner alone; returns its size in bytes. Raises OSError."""
    tokens, rows = segment.tokens.astype(TOKEN), segment.rows
    full, sliding = np.ascontiguousarray(rows.full), np.ascontiguousarray(rows.sliding)
    header = StateHeader(
        version=VERSION,
        facts=facts,
        context=context,
        first=segment.first,
        after=segment.after,
        tokens=len(tokens),
        sliding=len(sliding),
        tokens_sha256=_digest(tokens, full),
        sliding_sha256=_digest(sliding),
        seconds=segment.seconds,
    )
    text = json.dumps(to_json(header)).encode()
    parts = (MAGIC, len(text).to_bytes(4, "little"), text, tokens.tobytes(), full.data, sliding.data)
    atomic_write(path, parts)  # type: ignore[arg-type]
    return sum(memoryview(part).nbytes for part in parts)


class SegmentFile:
    """An open file of rows whose header was checked. A context manager that closes it."""

    def __init__(self, path: Path, facts: Mapping[str, str], row_bytes: tuple[int, int]) -> None:
        """Raises RequestError for a file that is no state, is damaged, or has other facts; OSError if it cannot be read."""
        self._path, self._row_bytes = path, row_bytes
        self._file: BinaryIO = os.fdopen(os.open(path, READ_FLAGS), "rb")
        try:
            state = os.fstat(self._file.fileno())
            self.owner_only = is_own(state) and (os.name != "posix" or not state.st_mode & 0o077)
            self.header = _read_header(path, self._file, row_bytes)
            _check_facts(path, self.header.facts, facts)
            self._start = self._file.tell()
        except BaseException:
            self._file.close()
            raise

    def read_full(self, out: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Fills `out` [tokens, bytes] with the rows of full attention; returns the tokens. Raises as `__init__` does."""
        tokens = np.empty(self.header.tokens, TOKEN)
        self._fill(self._start, (tokens, out), self.header.tokens_sha256)
        return tokens.astype(np.int64)

    def read_sliding(self, out: NDArray[np.uint8]) -> None:
        """Fills `out` [sliding, bytes] with the rows of sliding layers. Raises as `__init__` does."""
        header = self.header
        self._fill(self._start + header.tokens * (TOKEN.itemsize + self._row_bytes[0]), (out,), header.sliding_sha256)

    def _fill(self, place: int, arrays: Iterable[NDArray[Any]], sha256: str) -> None:
        self._file.seek(place)
        for array in arrays:
            view = array.data.cast("B") if array.size else memoryview(b"")
            if self._file.readinto(view) != len(view):  # type: ignore[attr-defined]
                raise RequestError("the state became shorter while it was read")
        if _digest(*arrays) != sha256:
            raise RequestError(f"the state {self._path} does not have the sha256 of its header; it is damaged")

    def __enter__(self) -> SegmentFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _read_header(path: Path, file: BinaryIO, row_bytes: tuple[int, int]) -> StateHeader:
    state = os.fstat(file.fileno())
    if not stat.S_ISREG(state.st_mode) or file.read(len(MAGIC)) != MAGIC:
        raise RequestError(f"{path} is not a file of a KV cache")
    length = int.from_bytes(file.read(4), "little")
    if length > min(MAX_HEADER_BYTES, state.st_size):
        raise RequestError(f"the state {path} has a header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed; it is damaged")
    with errors_as(RequestError, f"the state {path} has a damaged header", "remove it", ValueError, RecursionError, StructureError):
        data = json.loads(file.read(length))
        if isinstance(data, dict) and type(version := data.get("version")) is int and version != VERSION:
            raise RequestError(f"the state {path} has version {version}, this reader supports {VERSION}")
        header = from_json(StateHeader, data, "header")
    sound = header.tokens >= 1 and 0 <= header.sliding <= header.tokens and header.first >= 0 and 0 <= header.seconds <= MAX_SECONDS
    if not sound:
        raise RequestError(
            f"the state {path} holds {header.tokens} tokens, {header.sliding} in sliding layers, and begins at {header.first};"
            " it is damaged"
        )
    expected = file.tell() + header.tokens * (TOKEN.itemsize + row_bytes[0]) + header.sliding * row_bytes[1]
    if header.facts.get("rows") == f"{row_bytes[0]}+{row_bytes[1]}" and state.st_size != expected:
        raise RequestError(f"the state {path} has {state.st_size} bytes, its header says {expected}; it is damaged")
    return header


def _check_facts(path: Path, facts: Mapping[str, str], own: Mapping[str, str]) -> None:
    for name, value in own.items():
        if facts.get(name) != value:
            raise RequestError(f"the state {path} is of {FACTS[name]}")


def _digest(*arrays: NDArray[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.data if array.size else b"")
    return digest.hexdigest()


LIMIT = "1GB"
MIN_LIMIT = 1 << 20
# Reading must be this many times as fast as computing.
SPEEDUP = 5.0
# Fewer tokens than the first number are not worth a file; more than the second are split into several files.
MIN_TOKENS, MAX_TOKENS = 32, 512
# The most bytes of rows that may wait for the disk. If a prompt is computed faster than they are written, only a part of it is kept.
_WAITING = 256 << 20
# How many attempts are made to read one prompt. An attempt fails if a file turns out to be damaged or gone.
_TRIES = 8
_KEY_CHARACTERS = 32
_NAME = re.compile(rf"([0-9a-f]{{{_KEY_CHARACTERS}}})-([0-9a-f]{{{_KEY_CHARACTERS}}})-(\d{{1,9}})-(\d{{1,9}})\.kv")
_ANY_NAME = r"[0-9a-f-]+\.kv"
_FILES = CacheFiles(_NAME, _ANY_NAME)
segments, shrink, empty = _FILES.listed, _FILES.shrink, _FILES.empty
_SAMPLE = bytes(1 << 18)


def default_folder() -> Path:
    """Returns the folder of the user's prompt cache. Raises EdgeError for a user without a home folder."""
    return cache_folder() / "prompts"


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A segment in the folder, by its name."""

    path: Path
    key: str
    tokens: int
    sliding: int


@dataclass(frozen=True, kw_only=True)
class _Known:
    """A prefix of a text that the folder holds. `length` is in tokens; `sliding` is the number of sliding rows right before its end."""

    entries: tuple[_Entry, ...]
    length: int
    text: hashlib._Hash
    sliding: int

    def with_entry(self, entry: _Entry, text: hashlib._Hash) -> _Known:
        whole = entry.sliding == entry.tokens
        return _Known(
            entries=(*self.entries, entry),
            length=self.length + entry.tokens,
            text=text,
            sliding=entry.sliding + (self.sliding if whole else 0),
        )


class PromptCache:
    """A folder of segments, for all requests on one pair. Must be closed, which waits until everything is written."""

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, str],
        *,
        limit: int,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`facts` is what the rows depend on (`row_facts`). `limit` is the most bytes of the folder, with the files of all bundles.

        Raises RequestError for a limit below `MIN_LIMIT`.
        """
        if limit < MIN_LIMIT:
            raise RequestError(f"the prompt cache's limit is {limit} bytes; give at least {MIN_LIMIT}, or --prompt-cache off")
        self.folder, self.facts, self.limit = folder, dict(facts), limit
        self._notify = notify
        self.seconds_a_token: float | None = None
        self.refused: set[Path] = set()
        self.usable, self.writable = self._is_private(), True
        self._queue: queue.SimpleQueue[tuple[Path, RowSegment, int] | None] = queue.SimpleQueue()
        self._waiting, self._lock = 0, threading.Lock()
        self._writer: threading.Thread | None = None
        begin = time.perf_counter()
        hashlib.sha256(_SAMPLE).digest()
        # Copying from the file and into the KV cache takes about as long as hashing.
        self._read_seconds_a_byte = 2 * (time.perf_counter() - begin) / len(_SAMPLE)

    def request(self, target: SavableTarget, prompt: Sequence[int], client: str = "") -> CachedPrompt:
        """Returns a request's view of the cache, which does not find texts of other clients."""
        return CachedPrompt(self, target, prompt, hashlib.sha256(json.dumps([self.facts, client]).encode()))

    def pays(self, tokens: int, bytes_: int) -> bool:
        """Whether reading rows is expected to be `SPEEDUP` times as fast as computing them. True if computing was not measured yet."""
        return self.seconds_a_token is None or SPEEDUP * bytes_ * self._read_seconds_a_byte <= tokens * self.seconds_a_token

    def known(self, tokens: NDArray[np.int32], text: hashlib._Hash, target: SavableTarget) -> tuple[_Known, _Known]:
        """Returns the longest prefix of `tokens` whose rows are in the folder, and the longest one that the target can continue from.

        To continue, the target needs the sliding rows right before the end of the prefix: as many as its window has, or all if there are
        fewer. The end must not be inside an image whose rows attend to later ones.
        """
        whole = isinstance(target, MediaTarget) and target.whole_rows > 0
        entries: dict[str, list[_Entry]] = {}
        for name in self._names():
            if (match := _NAME.fullmatch(name)) and (path := self.folder / name) not in self.refused and int(match[4]) <= int(match[3]):
                entry = _Entry(path=path, key=match[2], tokens=int(match[3]), sliding=int(match[4]))
                entries.setdefault(match[1], []).append(entry)
        nothing = _Known(entries=(), length=0, text=text, sliding=0)
        reached, lengths, usable = {0: nothing}, [0], nothing
        longest = nothing
        while lengths:
            longest = reached[heapq.heappop(lengths)]
            if longest.sliding >= min(longest.length, target.sliding_rows) and not (whole and inside_image(tokens, longest.length)):
                usable = longest
            for entry in entries.get(longest.text.hexdigest()[:_KEY_CHARACTERS], ()):
                end = longest.length + entry.tokens
                if not longest.length < end <= len(tokens):
                    continue
                after = longest.text.copy()
                after.update(tokens[longest.length : end].astype(TOKEN).data)
                further = longest.with_entry(entry, after)
                if after.hexdigest()[:_KEY_CHARACTERS] == entry.key and (end not in reached or further.sliding > reached[end].sliding):
                    if end not in reached:
                        heapq.heappush(lengths, end)
                    reached[end] = further
        return longest, usable

    def keep(self, after: str, key: str, segment: RowSegment, context: int) -> bool:
        """Writes a segment in another thread. Returns False if too many bytes already wait for the disk."""
        size = segment.rows.full.nbytes + segment.rows.sliding.nbytes
        with self._lock:
            if self._waiting + size > _WAITING:
                return False
            self._waiting += size
        name = f"{after[:_KEY_CHARACTERS]}-{key[:_KEY_CHARACTERS]}-{len(segment.tokens)}-{len(segment.rows.sliding)}.kv"
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="edge-mtp prompt cache", daemon=True)
            self._writer.start()
        self._queue.put((self.folder / name, segment, context))
        return True

    def refuse(self, path: Path, error: Exception) -> None:
        """Ignores a file that cannot be used from now on. Removes it if it is a link or its content does not match its name."""
        self.refused.add(path)
        with contextlib.suppress(OSError):
            if is_own(path.lstat()) and (isinstance(error, RequestError) or path.is_symlink()):
                path.unlink()
                self.refused.discard(path)
        self._notify(f"a file of the prompt cache is not used ({error}); its prompt is computed anew")

    def give_up(self, error: Exception, *, reading: bool = False) -> None:
        """Stops writing; after a failure while `reading`, stops reading too."""
        if self.writable:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
            failed, without = ("used", "it") if reading else ("written", "keeping prompts")
            self._notify(f"the prompt cache {self.folder} cannot be {failed} ({reason}); this run goes on without {without}")
        self.writable, self.usable = False, self.usable and not reading

    def close(self) -> None:
        """Waits until everything is written. Can be called twice."""
        if self._writer is not None:
            self._queue.put(None)
            self._writer.join()
            self._writer = None

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            path, segment, context = item
            if self.writable:
                try:
                    self._write(path, segment, context)
                except OSError as error:
                    self.give_up(error)
            with self._lock:
                self._waiting -= segment.rows.full.nbytes + segment.rows.sliding.nbytes
            del item, segment  # frees the rows now, not when the next segment comes

    def _write(self, path: Path, segment: RowSegment, context: int) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_symlink():
            path.unlink()
        if not path.exists() or path in self.refused:
            write_segment(path, segment, self.facts, context)
            self.refused.discard(path)
            shrink(self.folder, self.limit)

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self.folder.iterdir()]
        except OSError:
            return []

    def _is_private(self) -> bool:
        """Whether the folder does not exist yet, or no other user can write files into it."""
        try:
            state = self.folder.stat()
        except FileNotFoundError:
            return True
        except (OSError, ValueError) as error:
            self._notify(f"the prompt cache {self.folder} cannot be read ({error}); this run goes on without it")
            return False
        if not stat.S_ISDIR(state.st_mode):
            reason = "is not a folder"
        elif not is_own(state):
            reason = f"belongs to another user (number {state.st_uid})"
        elif os.name == "posix" and state.st_mode & 0o022:
            reason = f"may be written by others (mode {stat.S_IMODE(state.st_mode):o})"
        else:
            clear_stale_in(self.folder, _ANY_NAME)
            return True
        self._notify(f"the prompt cache {self.folder} {reason}; this run goes on without it, name a folder of your own")
        return False


class CachedPrompt:
    """One request's view of a prompt cache. `target` holds the request's rows."""

    def __init__(self, cache: PromptCache, target: SavableTarget, prompt: Sequence[int], root: hashlib._Hash) -> None:
        """`root` is the hash of the client and of the facts that the rows depend on."""
        self._cache, self.target, self._root = cache, target, root
        self._prompt = np.asarray(prompt, np.int32)
        self._stored: tuple[int, hashlib._Hash] | None = None
        self._computed, self._seconds = 0, 0.0

    def reading(self, held: int) -> Iterator[int]:
        """Restores the longest known prefix of the prompt, one file per step.

        Yields the number of tokens in the target's cache after each step. `held` tokens are there at the beginning.
        """
        for _ in range(_TRIES if self._cache.usable else 0):
            _, known = self._cache.known(self._prompt, self._root, self.target)
            if known.length - held < MIN_TOKENS:
                return
            if (yield from self._read(known, held)):
                return

    def keep(self, computed: int, seconds: float, *, complete: bool) -> None:
        """Writes the target's rows that are not in the folder. `computed` of them were computed just now, in `seconds`.

        If they are not a `complete` piece, they are written later, together with the rest of the piece.
        """
        cache, target = self._cache, self.target
        self._computed, self._seconds = self._computed + computed, self._seconds + seconds
        if self._computed:
            cache.seconds_a_token = self._seconds / self._computed
        if not (complete and cache.usable and cache.writable):
            return
        tokens = target.tokens.copy()
        if self._stored is None:
            known, _ = cache.known(tokens, self._root, target)
            self._stored = known.length, known.text
        first = self._stored[0]
        count = len(tokens) - first
        size = count * sum(target.row_bytes)
        if count >= MIN_TOKENS and size <= _WAITING and cache.seconds_a_token is not None and cache.pays(count, size):
            try:
                self._keep_rows(tokens, target.state(first))
            except (EdgeRuntimeError, MemoryError) as error:
                cache.give_up(error, reading=True)

    def _keep_rows(self, tokens: NDArray[np.int32], rows: KvRows) -> None:
        assert self._stored is not None
        start, text = self._stored
        lost = len(tokens) - len(rows.sliding)
        for first in range(start, len(tokens), MAX_TOKENS):
            end = min(first + MAX_TOKENS, len(tokens))
            after, text = text.hexdigest(), text.copy()
            text.update(tokens[first:end].astype(TOKEN).data)
            sliding = rows.sliding[max(0, first - lost) : max(0, end - lost)]
            segment = RowSegment(
                tokens=tokens[first:end].astype(np.int64),
                rows=KvRows(rows.full[first - start : end - start], sliding),
                first=first,
                after=after,
                seconds=(end - first) * (self._cache.seconds_a_token or 0.0),
            )
            if not self._cache.keep(after, text.hexdigest(), segment, self.target.context):
                return
            self._stored = end, text

    def _read(self, known: _Known, held: int) -> Generator[int, None, bool]:
        """Restores the rows of `known`. Returns True when that is done or given up, and False if a file turned out to be unusable."""
        cache, target, seconds, computed = self._cache, self.target, 0.0, 0.0
        try:
            read = _Read(known, target, self._root)
        except MemoryError as error:
            cache.give_up(error, reading=True)
            return True
        for number, entry in enumerate(known.entries):
            begin = time.perf_counter()
            try:
                computed += read.add(number, entry, cache.facts, self._prompt)
            except FileNotFoundError:
                return False  # another process has removed it
            except (RequestError, OSError) as error:
                cache.refuse(entry.path, error)
                return False
            seconds += time.perf_counter() - begin
            if SPEEDUP * seconds > computed:
                return True
            yield held
        try:
            target.restore(self._prompt[: known.length].tolist(), read.rows)
        except EdgeRuntimeError as error:
            cache.give_up(error, reading=True)
            return True
        self._stored = known.length, known.text
        for entry in reversed(known.entries):  # the first entry becomes the newest, so that segments which others follow are removed last
            with contextlib.suppress(OSError):
                os.utime(entry.path)
        yield known.length
        return True


class _Read:
    """The rows of a prompt's prefix while they are read. Sliding rows are read only as far as they are needed."""

    def __init__(self, known: _Known, target: SavableTarget, root: hashlib._Hash) -> None:
        self._row_bytes, self._text = target.row_bytes, root.copy()
        left, self._sliding_from = min(known.length, target.sliding_rows), len(known.entries)
        while left > 0:
            self._sliding_from -= 1
            left -= known.entries[self._sliding_from].sliding
        sliding = sum(entry.sliding for entry in known.entries[self._sliding_from :])
        self.rows = KvRows(np.empty((known.length, self._row_bytes[0]), np.uint8), np.empty((sliding, self._row_bytes[1]), np.uint8))
        self._place = self._sliding_place = 0

    def add(self, number: int, entry: _Entry, facts: Mapping[str, str], prompt: NDArray[np.int32]) -> float:
        """Reads the next entry; returns the seconds that computing it took. Raises RequestError if it does not match its name."""
        first, end = self._place, self._place + entry.tokens
        with SegmentFile(entry.path, facts, self._row_bytes) as file:
            header = file.header
            if not file.owner_only:
                raise RequestError(f"the state {entry.path} is another user's, or open to others")
            named = first, entry.tokens, entry.sliding, self._text.hexdigest()
            if (header.first, header.tokens, header.sliding, header.after) != named:
                raise RequestError(f"the state {entry.path} is not the one that its name says; it is damaged")
            tokens = file.read_full(self.rows.full[first:end])
            if (tokens != prompt[first:end]).any():
                raise RequestError(f"the state {entry.path} is of another text than its name says; it is damaged")
            if number >= self._sliding_from:
                begin, self._sliding_place = self._sliding_place, self._sliding_place + entry.sliding
                file.read_sliding(self.rows.sliding[begin : self._sliding_place])
        self._text.update(tokens.astype(TOKEN).data)
        self._place = end
        return header.seconds
