"""adb's sync service: files to the fake phone, versions 1 and 2 of stat and list, as the client asks."""

from __future__ import annotations

import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fake_adbd import Faults, Stream
    from fake_phone import FakePhone

NO_SUCH_FILE = 2


class SyncService:
    """Answers the requests of one sync stream."""

    def __init__(self, stream: Stream, phone: FakePhone, faults: Faults) -> None:
        self._stream, self._phone, self._faults = stream, phone, faults

    def serve(self) -> None:
        """Answers until the client quits."""
        while True:
            kind, length = struct.unpack("<4sI", self._stream.exactly(8))
            if kind == b"QUIT":
                return
            name = self._stream.exactly(length).decode()
            if kind in (b"STAT", b"STA2", b"LST2"):
                self._stream.write(_status(kind, self._phone.path(name)))
            elif kind in (b"LIST", b"LIS2"):
                self._list(self._phone.path(name), 2 if kind == b"LIS2" else 1)
            elif kind == b"SEND":
                self._take(name)
            else:
                self._fail(f"unknown request {kind!r}")

    def _list(self, folder: Path, version: int) -> None:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            name = path.name.encode()
            entry = _status(b"DNT2" if version == 2 else b"DENT", path)
            self._stream.write(entry + struct.pack("<I", len(name)) + name)
        size = 72 if version == 2 else 16
        self._stream.write(b"DONE" + bytes(size))

    def _take(self, request: str) -> None:
        name, _, mode = request.rpartition(",")
        path, failure, blocks = self._phone.path(name), "", []
        while True:
            kind, length = struct.unpack("<4sI", self._stream.exactly(8))
            if kind == b"DONE":
                break
            blocks.append(self._stream.exactly(length))
            if self._faults.room is not None:
                self._faults.room -= length
                failure = "write failed: No space left on device" if self._faults.room < 0 else failure
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not failure:
                path.write_bytes(b"".join(blocks))
                path.chmod(int(mode) & 0o777 | 0o600)
        except OSError as error:
            failure = f"couldn't create file: {error.strerror}"
        if failure:
            self._fail(failure)
            return
        self._stream.write(struct.pack("<4sI", b"OKAY", 0))

    def _fail(self, text: str) -> None:
        self._stream.write(struct.pack("<4sI", b"FAIL", len(text)) + text.encode())


def _status(kind: bytes, path: Path) -> bytes:
    try:
        found = path.stat() if kind == b"STA2" else path.lstat()
    except OSError:
        return struct.pack("<4s3I", kind, 0, 0, 0) if kind in (b"STAT", b"DENT") else struct.pack("<4sI", kind, NO_SUCH_FILE) + bytes(64)
    if kind in (b"STAT", b"DENT"):
        return struct.pack("<4s3I", kind, found.st_mode, found.st_size & 0xFFFFFFFF, int(found.st_mtime))
    times = [int(t) for t in (found.st_atime, found.st_mtime, found.st_ctime)]
    mode = found.st_mode if stat.S_IFMT(found.st_mode) else 0
    return struct.pack(
        "<4sI2Q4IQ3q", kind, 0, found.st_dev, found.st_ino, mode, found.st_nlink, found.st_uid, found.st_gid, found.st_size, *times
    )
