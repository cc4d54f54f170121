"""The phone's end of adb, for the real adb client: transport protocol, shell with exit codes, exec and sync, and faults on request.

Protocol as Android's sources describe it (adb's protocol.txt, SERVICES.TXT, SYNC.TXT and shell_protocol.h). No authentication, no TLS.
"""

from __future__ import annotations

import os
import queue
import socket
import stat
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from fake_phone import FakePhone

MAXIMUM = 1 << 20
VERSION = 0x01000001
HEADER = struct.Struct("<4sIIIII")
IN, OUT, ERR, EXIT, CLOSE = range(5)  # kinds of a frame of shell_v2
NO_SUCH_FILE = 2
ALL_FEATURES = "shell_v2,cmd,stat_v2,fixed_push_mkdir,apex"


@dataclass
class Faults:
    """What goes wrong. `drop_after`: bytes from the client until the link breaks, once each; `room`: bytes that the disk takes."""

    unauthorized: bool = False
    silent: bool = False
    features: str = ALL_FEATURES
    drop_after: list[int] = field(default_factory=list)
    room: int | None = None


class Gone(Exception):
    """The link is broken."""


class Stream:
    """One service that the client opened."""

    def __init__(self, link: Link, mine: int, theirs: int) -> None:
        self._link, self._mine, self._theirs = link, mine, theirs
        self._okay = threading.Semaphore(0)
        self._arrived: queue.Queue[bytes | None] = queue.Queue()
        self._rest = b""
        self.closed = False

    def arrive(self, data: bytes | None) -> None:
        """Called by the link: bytes of the client, None at its end."""
        self._arrived.put(data)

    def okay(self) -> None:
        """Called by the link: the client took what was written."""
        self._okay.release()

    def write(self, data: bytes) -> None:
        """Sends bytes, one packet at a time, each of which the client must take before the next."""
        for start in range(0, len(data), MAXIMUM):
            self._link.send(b"WRTE", self._mine, self._theirs, data[start : start + MAXIMUM])
            while not self._okay.acquire(timeout=0.2):
                if self.closed or self._link.gone:
                    raise Gone

    def read(self) -> bytes:
        """Returns some bytes; raises Gone at the end."""
        data = self._arrived.get()
        if data is None:
            self.closed = True
            raise Gone
        self._link.send(b"OKAY", self._mine, self._theirs)
        return data

    def exactly(self, count: int) -> bytes:
        while len(self._rest) < count:
            self._rest += self.read()
        data, self._rest = self._rest[:count], self._rest[count:]
        return data

    def close(self) -> None:
        """Tells the client that this is all."""
        with suppress(Gone):
            self._link.send(b"CLSE", self._mine, self._theirs)


class Link:
    """One connection of an adb server."""

    def __init__(self, daemon: FakeAdbd, connection: socket.socket) -> None:
        self._daemon, self._socket = daemon, connection
        self._lock = threading.Lock()
        self._streams: dict[int, Stream] = {}
        self._received = 0
        self.gone = False

    def send(self, command: bytes, first: int, second: int, data: bytes = b"") -> None:
        magic = struct.unpack("<I", command)[0] ^ 0xFFFFFFFF
        with self._lock:
            try:
                self._socket.sendall(HEADER.pack(command, first, second, len(data), sum(data) & 0xFFFFFFFF, magic) + data)
            except OSError as error:
                self.gone = True
                raise Gone from error

    def serve(self) -> None:
        with suppress(Gone, OSError):
            while True:
                command, first, second, data = self._packet()
                self._answer(command, first, second, data)
        self.close()

    def close(self) -> None:
        self.gone = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for stream in list(self._streams.values()):
            stream.closed = True
            stream.arrive(None)

    def _packet(self) -> tuple[bytes, int, int, bytes]:
        command, first, second, length, _, _ = HEADER.unpack(self._exactly(HEADER.size))
        return command, first, second, self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        faults = self._daemon.faults
        while len(data) < count:
            block = self._socket.recv(min(count - len(data), 1 << 16))
            if not block:
                raise Gone
            data += block
            self._received += len(block)
            if faults.drop_after and self._received >= faults.drop_after[0]:
                faults.drop_after.pop(0)
                raise Gone
        return bytes(data)

    def _answer(self, command: bytes, first: int, second: int, data: bytes) -> None:
        faults = self._daemon.faults
        if command == b"CNXN" and not faults.silent:
            if faults.unauthorized:
                self.send(b"AUTH", 1, 0, os.urandom(20))
                return
            banner = f"device::ro.product.name=fake;ro.product.model=Fake_One;ro.product.device=fake;features={faults.features}"
            self.send(b"CNXN", VERSION, MAXIMUM, banner.encode())
        elif command == b"AUTH" and second == 0 and first == 2:
            self.send(b"AUTH", 1, 0, os.urandom(20))  # no key of the client's is accepted
        elif command == b"OPEN":
            self._open(first, data.rstrip(b"\0").decode())
        elif command == b"WRTE" and second in self._streams:
            self._streams[second].arrive(data)
        elif command == b"OKAY" and second in self._streams:
            self._streams[second].okay()
        elif command == b"CLSE" and second in self._streams:
            self._streams.pop(second).arrive(None)

    def _open(self, theirs: int, service: str) -> None:
        kind, _, argument = service.partition(":")
        mine = theirs + 1000
        if kind.split(",")[0] not in ("shell", "exec", "sync"):
            self.send(b"CLSE", 0, theirs)
            return
        stream = self._streams[mine] = Stream(self, mine, theirs)
        self.send(b"OKAY", mine, theirs)
        threading.Thread(target=self._serve, args=(stream, kind, argument), daemon=True).start()

    def _serve(self, stream: Stream, kind: str, argument: str) -> None:
        phone = self._daemon.phone
        with suppress(Gone, OSError):
            if kind == "sync":
                SyncService(stream, phone, self._daemon.faults).serve()
            else:
                ShellService(stream, phone, framed=kind.startswith("shell,v2")).serve(argument)
        stream.close()


class ShellService:
    """`shell,v2` (frames, exit code), `shell` and `exec` (both outputs in one, no exit code)."""

    def __init__(self, stream: Stream, phone: FakePhone, *, framed: bool) -> None:
        self._stream, self._phone, self._framed = stream, phone, framed

    def serve(self, line: str) -> None:
        running = self._phone.start(line)
        threading.Thread(target=self._feed, args=(running.process.stdin,), daemon=True).start()
        code = running.relay(lambda data: self._write(OUT, data), lambda data: self._write(ERR, data), lambda: self._stream.closed)
        if self._framed and code is not None:
            self._write(EXIT, bytes([code & 0xFF]))

    def _write(self, kind: int, data: bytes) -> None:
        self._stream.write(struct.pack("<BI", kind, len(data)) + data if self._framed else data)

    def _feed(self, standard_input: IO[bytes]) -> None:
        with suppress(Gone, OSError, ValueError):
            while self._framed:
                kind, length = struct.unpack("<BI", self._stream.exactly(5))
                data = self._stream.exactly(length)
                if kind == IN:
                    standard_input.write(data)
                    standard_input.flush()
                elif kind == CLOSE:
                    standard_input.close()
            while True:
                standard_input.write(self._stream.read())
                standard_input.flush()


class FakeAdbd:
    """Listens on a port of its own for adb servers. `faults` may be changed at any time."""

    def __init__(self, phone: FakePhone) -> None:
        self.phone, self.faults = phone, Faults()
        self._links: list[Link] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.serial = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    def unplug(self) -> None:
        """Breaks every link; what runs on the phone goes on."""
        for link in self._links:
            link.close()
        self._links.clear()

    def reboot(self) -> None:
        self.unplug()
        self.phone.kill_all()
        self.phone.boot()

    def close(self) -> None:
        self._listener.close()
        self.unplug()
        self.phone.close()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                link = Link(self, connection)
                self._links.append(link)
                threading.Thread(target=link.serve, daemon=True).start()


class SyncService:
    """Answers the requests of one sync stream: files to the phone, and the second version of stat. Folders are not listed."""

    def __init__(self, stream: Stream, phone: FakePhone, faults: Faults) -> None:
        self._stream, self._phone, self._faults = stream, phone, faults

    def serve(self) -> None:
        while True:
            kind, length = struct.unpack("<4sI", self._stream.exactly(8))
            if kind == b"QUIT":
                return
            name = self._stream.exactly(length).decode()
            if kind in (b"STA2", b"LST2"):
                self._stream.write(_status(kind, self._phone.path(name)))
            elif kind == b"SEND":
                self._take(name)
            else:
                self._fail(f"unknown request {kind!r}")

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
        result = path.stat() if kind == b"STA2" else path.lstat()
    except OSError:
        return struct.pack("<4sI", kind, NO_SUCH_FILE) + bytes(64)
    times = [int(t) for t in (result.st_atime, result.st_mtime, result.st_ctime)]
    mode = result.st_mode if stat.S_IFMT(result.st_mode) else 0
    return struct.pack(
        "<4sI2Q4IQ3q", kind, 0, result.st_dev, result.st_ino, mode, result.st_nlink, result.st_uid, result.st_gid, result.st_size, *times
    )
