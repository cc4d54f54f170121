"""The packed cache: weights in the kernels' own order, in files that the first start writes and later starts map (src/packed_file.h).

A packed file is identified by its sources, the bundle's files. Its name, which it also contains, is a hash of their SHA-256s and of the
layout's version; if the check of the bundle is switched off, also of their sizes, times and inodes. So changed sources get another name,
and a packed file that is found can be used without reading its sources.

Packed files are trusted and not hashed at a start, so only this user may be able to write them. A folder or file that belongs to another
user, or that others may write, is not used, nor is a link. A file that is truncated or of another version is written anew. All files
together take at most `LIMIT` bytes and at most half of the free disk space; the least recently used ones are deleted. No failure here fails
a start: weights are then packed into memory, or not saved, and `notify` gets one sentence.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_devices.errors import EdgeError, byte_text
from edge_devices.files.atomic_write import clear_stale_in, unforeseen_temporary_of
from edge_devices.files.user_cache import CacheFiles, cache_folder, only_ours
from edge_runtime.backends.kernels.loader import load_library, variant

FOLDER = "packed"  # in the user's cache
LIMIT = 8_000_000_000
# For sources of fewer bytes, packing is faster than writing to a disk.
LEAST = 32_000_000
_NAME = re.compile(r"[0-9a-f]{64}\.packed")
_ANY_NAME = r"[0-9a-f]+\.packed"
_FILES = CacheFiles(_NAME, _ANY_NAME)
packed_files, shrink, empty = _FILES.listed, _FILES.shrink, _FILES.empty


@dataclass(frozen=True, kw_only=True)
class PackedSource:
    """A file of a bundle with weights to pack, and its SHA-256."""

    path: Path
    sha256: str


def default_folder() -> Path:
    """Returns the folder of the user's packed cache. Raises EdgeError for a user without a home folder."""
    return cache_folder() / FOLDER


def user_cache(notify: Callable[[str], None], *, checked: bool) -> PackedCache | None:
    """Returns the user's own cache; None for a user without a home folder. `checked`: files are compared with the hashes in manifests."""
    with contextlib.suppress(EdgeError):
        return PackedCache(default_folder(), notify, checked=checked)
    return None


class PackedCache:
    """A folder of packed files, used whenever this process loads a model."""

    def __init__(self, folder: Path, notify: Callable[[str], None] = lambda _: None, *, checked: bool = True, limit: int = LIMIT) -> None:
        """`checked`: the hashes of sources were verified; `limit` is in bytes."""
        self.folder = folder
        self._notify, self._checked, self._limit = notify, checked, limit

    @contextlib.contextmanager
    def loading(self, *sources: PackedSource) -> Iterator[None]:
        """While this context is open, models that this thread loads take their packed weights from the cache, or add them to it."""
        kernels = _kernels()
        opened = None
        if kernels is not None and variant() is not None:
            try:
                opened = self._opened(kernels, sources)
            except OSError as error:
                self._go_without(error.strerror or str(error))
        if opened is None:
            yield
            return
        try:
            kernels.edge_packed_use(opened.pointer)
            try:
                yield
            finally:
                kernels.edge_packed_use(None)
        except BaseException:
            opened.close()
            raise
        self._end(opened, sources)

    def _opened(self, kernels: Any, sources: Sequence[PackedSource]) -> _OpenedFile | None:
        """Opens the packed file of these sources, or creates it. Returns None if it is too small to be worth it, or too large. OSError."""
        size = sum(source.path.stat().st_size for source in sources)
        if size < LEAST:
            return None
        facts = self._facts(sources)
        key = hashlib.sha256(json.dumps([kernels.edge_packed_version(), *facts]).encode()).digest()
        path = self.folder / f"{key.hex()}.packed"
        _wait_for(path)
        self._make_private()
        if pointer := kernels.edge_packed_open(os.fsencode(path), key):
            with contextlib.suppress(OSError):
                os.utime(path)
            return _OpenedFile(kernels, pointer, path, facts, reads=True)
        clear_stale_in(self.folder, _ANY_NAME)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # damaged, or a link
        room = self._room()
        if size > room:
            self._go_without(f"its files may take {byte_text(room)} here, and this bundle's take about {byte_text(size)}")
            return None
        shrink(self.folder, room - size)
        error = ctypes.c_int()
        pointer = kernels.edge_packed_create(os.fsencode(unforeseen_temporary_of(path)), key, ctypes.byref(error))
        if not pointer:
            raise OSError(error.value, os.strerror(error.value))
        return _OpenedFile(kernels, pointer, path, facts, reads=False)

    def _end(self, opened: _OpenedFile, sources: Sequence[PackedSource]) -> None:
        """Saves what was written. A thread of its own waits for the disk; the process does not end before it has finished."""
        error, packed = opened.error, opened.packed
        if opened.reads:
            opened.close()
            if packed:  # the file lacks matrices, because another version of the engine wrote it
                opened.path.unlink(missing_ok=True)
            return
        if error:
            self._go_without(os.strerror(error))
        # If a source was replaced meanwhile, the packed weights may not be those of the hashes.
        if error or not packed or self._facts(sources) != opened.facts:
            opened.close()
            return
        writer = threading.Thread(target=self._keep, args=(opened,), name="edge-mtp packed cache")
        with _WRITERS_LOCK:
            _WRITERS[opened.path] = writer
        writer.start()

    def _keep(self, opened: _OpenedFile) -> None:
        error = opened.keep()
        opened.close()
        if error:
            self._go_without(os.strerror(error))
        with _WRITERS_LOCK:
            if _WRITERS.get(opened.path) is threading.current_thread():
                del _WRITERS[opened.path]

    def _facts(self, sources: Sequence[PackedSource]) -> list[object]:
        """Returns what a packed file depends on, besides the layout: the hashes of its sources and, if unchecked, their states."""
        hashes = [source.sha256 for source in sources]
        return [*hashes, *(() if self._checked else (_state(source.path) for source in sources))]

    def _make_private(self) -> None:
        """Creates the folder. Raises OSError if the path is no folder, belongs to another user, or may be written by others."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = self.folder.stat()
        if not stat.S_ISDIR(state.st_mode):
            raise NotADirectoryError(0, "it is not a folder")
        if not only_ours(state):
            raise PermissionError(0, "it belongs to another user or others may write it")

    def _room(self) -> int:
        """Returns how many bytes all files together may take."""
        held = sum(size for _, size, _ in packed_files(self.folder))
        return min(self._limit, (shutil.disk_usage(self.folder).free + held) // 2)

    def _go_without(self, reason: str) -> None:
        self._notify(f"the packed cache {self.folder} is not used ({reason}); weights are packed into memory at each start")


class _OpenedFile:
    """A packed file that is being read (`reads`) or written. It must be closed."""

    def __init__(self, kernels: Any, pointer: int, path: Path, facts: list[object], *, reads: bool) -> None:
        self._kernels, self.pointer, self.path, self.facts, self.reads = kernels, pointer, path, facts, reads

    @property
    def packed(self) -> int:
        """How many matrices were packed during the load: all in a new file, and in an existing file those that it lacks."""
        counts = (ctypes.c_int64 * 2)()
        self._kernels.edge_packed_counts(self.pointer, counts)
        return counts[1]

    @property
    def error(self) -> int:
        """The errno of a failed write, 0 if none failed."""
        error: int = self._kernels.edge_packed_counts(self.pointer, (ctypes.c_int64 * 2)())
        return error

    def keep(self) -> int:
        """Waits for the disk, then gives the file its final name. Returns an errno, 0 for success."""
        error: int = self._kernels.edge_packed_keep(self.pointer, os.fsencode(self.path))
        return error

    def close(self) -> None:
        self._kernels.edge_packed_close(self.pointer)


# The threads of this process that are writing files to the disk.
_WRITERS: dict[Path, threading.Thread] = {}
_WRITERS_LOCK = threading.Lock()


def _wait_for(path: Path) -> None:
    """Waits until this process has finished writing a file."""
    with _WRITERS_LOCK:
        writer = _WRITERS.get(path)
    if writer is not None:
        writer.join()


def _state(path: Path) -> list[int]:
    state = path.stat()
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, state.st_dev]


def _kernels() -> Any:
    """Returns the library with its functions declared; None if it is missing or an older build without packed files."""
    kernels: Any = load_library()
    if kernels is None or not hasattr(kernels, "edge_packed_open"):
        return None
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    kernels.edge_packed_open.restype = kernels.edge_packed_create.restype = pointer
    kernels.edge_packed_open.argtypes = [text, text]
    kernels.edge_packed_create.argtypes = [text, text, ctypes.POINTER(ctypes.c_int)]
    kernels.edge_packed_use.argtypes = kernels.edge_packed_close.argtypes = [pointer]
    kernels.edge_packed_use.restype = kernels.edge_packed_close.restype = None
    kernels.edge_packed_counts.argtypes = [pointer, ctypes.POINTER(ctypes.c_int64)]
    kernels.edge_packed_keep.argtypes = [pointer, text]
    kernels.edge_packed_version.restype = ctypes.c_uint32
    return kernels
