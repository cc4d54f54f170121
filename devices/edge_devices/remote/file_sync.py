"""Sends folders to a device and fetches files. Only differing files are sent, all are verified by sha256, and transfers can resume.

The device needs sh, find, sha256sum, tar, zcat, cat, head, tail, mv, rm, mkdir, chmod and wc, which toybox and coreutils (with gzip) have.
Files are sent together as compressed archives, except the largest, which are sent one by one. Archives and largest files are sent in chunks
that are appended to FILE.partial, so a broken link costs only one chunk.
"""

from __future__ import annotations

import gzip
import os
import posixpath
import re
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from edge_devices.errors import LinkError, TransportError, byte_text
from edge_devices.files.limited_read import parse_integer, sha256_of
from edge_devices.remote.transport import Transport, last_line, shell
from edge_devices.waiting import Report, no_report

Outcome = TypeVar("Outcome")
CHUNK_BYTES = 32 << 20
LARGE_BYTES = ARCHIVE_BYTES = 64 << 20  # larger files (models) do not compress; the size of an archive is before compression
MAX_PULL_BYTES = 1 << 30  # the largest file is the energy log, 100 bytes per reading: this is 12 days of ten per second
HASHING_SECONDS = 3600.0
ATTEMPTS, PAUSE_SECONDS = 3, 2.0
PARTIAL, INCOMING = ".partial", ".incoming"
# A chunk's hash is checked on the device before it is appended. An interrupted append is detected by the hash of the part.
HASH = 'sha256sum < "$1" | cut -c1-64'
# Without -o, a tar that root runs would set the owner that the archive names. If the archive is missing, an earlier attempt unpacked it.
UNPACK = 'cd "$1" && { test ! -e "$2" || { zcat < "$2" | tar -xof - && rm -f "$2"; }; }'
APPEND = 'test "$(sha256sum < "$1" | cut -c1-64)" = "$3" || exit 9; cat "$1" >> "$2" && rm "$1"'
SLICE = 'tail -c "+$2" < "$1" | head -c "$3"'
LISTING = 'cd "$1" 2>/dev/null || exit 0; find . -type f -exec sha256sum {} +'


@dataclass(frozen=True, kw_only=True)
class LocalFile:
    """A local file to send. `path` is relative to the folder, with slashes."""

    path: str
    source: Path
    bytes: int
    sha256: str

    @property
    def executable(self) -> bool:
        """Whether the file is executable here, and shall be on the device."""
        return os.access(self.source, os.X_OK)


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """The result of a push: files and bytes sent, files that were up to date, and files removed because only the device had them."""

    sent: int
    bytes: int
    unchanged: int
    removed: int


def push_tree(
    transport: Transport,
    folder: Path,
    target: str,
    report: Report = no_report,
    names: Sequence[str] | None = None,
) -> Pushed:
    """Makes `target` on the device equal to `folder`, or to the files `names` in it.

    `report` gets the share of the bytes that is sent. If the link breaks, there are up to 3 attempts. Raises TransportError for a symbolic
    link, because it could lead to any file of this machine.
    """
    files = local_files(folder, names)
    shell(transport, 'mkdir -p "$1"', target)
    present = device_files(transport, target)
    changed = [file for file in files if present.get(file.path) != file.sha256]
    kept = {file.path for file in files} | {file.path + PARTIAL for file in files}
    stale = sorted(present.keys() - kept)
    total, done = sum(file.bytes for file in changed), 0
    _require_space(transport, target, total, ARCHIVE_BYTES if changed else 0)
    _with_paths(transport, "rm -f", target, stale)
    _with_paths(transport, "mkdir -p", target, sorted({posixpath.dirname(file.path) or "." for file in changed}))
    step = f"sending {byte_text(total)}"
    small = [file for file in changed if file.bytes < LARGE_BYTES]
    for group in _groups(small):
        _push_archive(transport, group, target)
        done += sum(f.bytes for f in group)
        report(done / total if total else 1.0, step)
    for file in changed:
        if file.bytes >= LARGE_BYTES:
            _push_large(transport, file, target, lambda sent, before=done: report((before + sent) / total, step))  # type: ignore[misc]
            done += file.bytes
    _verify(transport, target, files)
    return Pushed(sent=len(changed), bytes=total, unchanged=len(files) - len(changed), removed=len(stale))


def push_file(transport: Transport, source: Path, target: str, progress: Callable[[int], None] = lambda _sent: None) -> None:
    """Sends one file in chunks, continuing an earlier attempt, and verifies it. Raises LinkError or TransportError."""
    file = LocalFile(path=posixpath.basename(target), source=source, bytes=source.stat().st_size, sha256=sha256_of(source))
    folder = posixpath.dirname(target)
    shell(transport, 'mkdir -p "$1"', folder)
    _push_large(transport, file, folder, progress)


def pull_file(transport: Transport, source: str, target: Path) -> None:
    """Fetches a file atomically and verifies it by sha256. Raises TransportError if it is missing, too large, or arrives damaged."""
    partial = target.with_name(target.name + PARTIAL)
    try:
        for _ in range(ATTEMPTS):
            size = parse_integer(shell(transport, 'wc -c < "$1"', source).strip())
            if size is None or size > MAX_PULL_BYTES:
                raise TransportError(
                    f"{transport.name}: {source} is larger than {byte_text(MAX_PULL_BYTES)} or has no size; it is left there"
                )
            expected = shell(transport, HASH, source, seconds=HASHING_SECONDS).strip()
            _pull_slices(transport, source, partial, size)
            if sha256_of(partial) == expected:
                partial.replace(target)
                return
        raise TransportError(f"{transport.name}: {source} arrived damaged {ATTEMPTS} times, or something still writes to it; try again")
    finally:
        partial.unlink(missing_ok=True)


def local_files(folder: Path, names: Sequence[str] | None = None) -> list[LocalFile]:
    """Returns the files below a folder, or only those in `names`, sorted, with their hashes.

    Raises TransportError for symbolic links, and for names that the device's listing cannot represent.
    """
    if not folder.is_dir():
        raise TransportError(f"{folder} is not a folder; give a folder to send")
    files = []
    for path in sorted(folder.rglob("*") if names is None else [folder / name for name in names]):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise TransportError(f"{path} is a symbolic link, and what it leads to is not sent; remove it, or put the file in its place")
        if path.is_dir() or path.name.endswith(PARTIAL):
            continue
        if re.search(r"[\x00-\x1f\\]", name):
            raise TransportError(f"{name!r} has a control character or a backslash in its name; rename it")
        files.append(LocalFile(path=name, source=path, bytes=path.stat().st_size, sha256=sha256_of(path)))
    return files


def device_files(transport: Transport, folder: str) -> dict[str, str]:
    """Returns the sha256 of every file below a folder of the device, by path.

    Lines with a path that leads out of the folder are ignored. A file name with a line end could cause such a line with toybox, and listed
    files may be removed.
    """
    listing = shell(transport, LISTING, folder, seconds=HASHING_SECONDS)
    lines = (re.fullmatch(r"([0-9a-f]{64})  \./(.+)", line) for line in listing.splitlines())
    return {line[2]: line[1] for line in lines if line and ".." not in line[2].split("/")}


def free_bytes(transport: Transport, folder: str) -> int | None:
    """Returns the free bytes of the file system for a folder of the device, even if it does not exist yet; None if df does not tell."""
    nearest = 'd="$1"; while ! test -d "$d"; do n="$(dirname "$d")"; test "$n" = "$d" && break; d="$n"; done; '
    script = nearest + 'df -kP "$d" 2>/dev/null || df -k "$d"'
    lines = shell(transport, script, folder if folder.startswith("/") else f"./{folder}").splitlines()
    numbers = re.findall(r"\s([0-9]{1,18})(?=\s)", lines[-1]) if len(lines) > 1 else []
    return int(numbers[2]) * 1024 if len(numbers) > 2 else None


def _require_space(transport: Transport, target: str, need: int, meanwhile: int) -> None:
    free = free_bytes(transport, target)
    if free is not None and need + meanwhile > free:
        raise TransportError(
            f"{transport.name}: {byte_text(need)} are to be sent, {byte_text(meanwhile)} more are needed meanwhile, and"
            f" {byte_text(free)} are free; delete files on the device, or `--clean` it"
        )


def _with_paths(transport: Transport, command: str, target: str, paths: list[str]) -> None:
    for start in range(0, len(paths), 200):  # the length of a command line is limited
        shell(transport, f'cd "$1" && shift && {command} -- "$@"', target, *paths[start : start + 200])


def _groups(files: list[LocalFile]) -> Iterator[list[LocalFile]]:
    group: list[LocalFile] = []
    for file in files:
        if group and sum(f.bytes for f in group) + file.bytes > ARCHIVE_BYTES:
            yield group
            group = []
        group.append(file)
    if group:
        yield group


def _push_archive(transport: Transport, files: list[LocalFile], target: str) -> None:
    """Sends files as one archive. The same files always make the same archive, so that an interrupted transfer can continue."""
    with tempfile.TemporaryDirectory() as folder:
        pack = Path(folder) / f"{INCOMING}.tgz"
        with pack.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, 0) as packed, tarfile.open(None, "w", packed) as tar:
            for file in files:
                entry = tarfile.TarInfo(file.path)
                entry.size, entry.mode = file.bytes, 0o755 if file.executable else 0o644
                with file.source.open("rb") as data:
                    tar.addfile(entry, data)
        push_file(transport, pack, posixpath.join(target, pack.name))
        retried(lambda: shell(transport, UNPACK, target, pack.name, seconds=HASHING_SECONDS))


def _push_large(transport: Transport, file: LocalFile, folder: str, progress: Callable[[int], None]) -> None:
    target = posixpath.join(folder, file.path)
    partial, incoming = target + PARTIAL, posixpath.join(folder, INCOMING)
    retried(lambda: _push_chunks(transport, file, partial, incoming, progress))
    script = 'test -e "$1" || : > "$1"; chmod "$3" "$1" && mv "$1" "$2"'
    shell(transport, script, partial, target, "755" if file.executable else "644")
    if shell(transport, HASH, target, seconds=HASHING_SECONDS).strip() != file.sha256:
        shell(transport, 'rm -f "$1"', target)
        raise TransportError(f"{transport.name}: {target} arrived damaged and was removed; send it again")


def _push_chunks(transport: Transport, file: LocalFile, partial: str, incoming: str, progress: Callable[[int], None]) -> None:
    """Appends chunks after the part that the device already has. It can be called again after a broken link."""
    sent = _resume_at(transport, file, partial)
    with tempfile.TemporaryDirectory() as scratch, file.source.open("rb") as data:
        chunk = Path(scratch) / "chunk"
        while sent < file.bytes:
            data.seek(sent)
            chunk.write_bytes(data.read(CHUNK_BYTES))
            transport.put(chunk, incoming)
            done = transport.run(["sh", "-c", APPEND, "sh", incoming, partial, sha256_of(chunk)], seconds=HASHING_SECONDS)
            if done.code != 0:
                shell(transport, 'rm -f "$1"', partial)
                reason = "a chunk arrived damaged" if done.code == 9 else last_line(done)
                raise TransportError(f"{transport.name}: {reason}; {partial} was removed")
            sent += chunk.stat().st_size
            progress(sent)


def _resume_at(transport: Transport, file: LocalFile, partial: str) -> int:
    """Returns how many bytes of a file the device already has, verified by hash. A wrong part is removed."""
    size = shell(transport, 'test -f "$1" && wc -c < "$1" || echo 0', partial).strip()
    present = parse_integer(size) or 0
    if present:
        digest = shell(transport, HASH, partial, seconds=HASHING_SECONDS).strip()
        if present > file.bytes or digest != sha256_of(file.source, present):
            shell(transport, 'rm -f "$1"', partial)
            return 0
    return present


def _pull_slices(transport: Transport, source: str, target: Path, size: int) -> None:
    """Writes at most the first `size` bytes of the device's file to `target`. Missing or wrong bytes are found by the hash later."""
    with target.open("wb") as file:
        for start in range(0, size, CHUNK_BYTES):
            length = min(CHUNK_BYTES, size - start)
            done = transport.run(["sh", "-c", SLICE, "sh", source, str(start + 1), str(length)], seconds=HASHING_SECONDS)
            file.write(done.output[:length])


def retried(attempt: Callable[[], Outcome], pause_s: float | None = None) -> Outcome:
    """Calls `attempt` again if the link breaks, up to three times in all, and returns its result."""
    for _ in range(ATTEMPTS - 1):
        with suppress(LinkError):
            return attempt()
        time.sleep(PAUSE_SECONDS if pause_s is None else pause_s)
    return attempt()


def _verify(transport: Transport, target: str, files: list[LocalFile]) -> None:
    present = device_files(transport, target)
    wrong = [file.path for file in files if present.get(file.path) != file.sha256]
    if wrong:
        raise TransportError(f"{transport.name}: {len(wrong)} files arrived damaged, {wrong[0]} among them; send again")
