"""Folders to and from a device: only what differs is sent, everything is verified by sha256, and what broke off is resumed.

The device needs sh, find, sha256sum, tar, cat, mv, rm, mkdir, chmod and wc: toybox and coreutils both have them.
Small files travel together in a tar; large ones in chunks that are appended to FILE.partial, so a broken link costs one chunk.
"""

from __future__ import annotations

import os
import posixpath
import re
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edge_devices.errors import LinkError, TransportError
from edge_devices.files.hashing import sha256_of
from edge_devices.machine.memory import byte_text
from edge_devices.machine.system import CommandResult
from edge_devices.transports.base import Transport, last_line, parse_integer, shell

CHUNK = 32 << 20
LARGE = 4 << 20
HASHING_SECONDS = 3600.0
ATTEMPTS, PAUSE_SECONDS = 3, 2.0
PARTIAL, INCOMING = ".partial", ".incoming"
# Hashes a chunk on the device before it is appended: an append that was cut short is seen by its length.
HASH = 'sha256sum < "$1" | cut -c1-64'
# -o: a tar run by root would else give the files to the owner that the archive names. No archive any more: an earlier attempt did it.
UNPACK = 'cd "$1" && { test ! -e "$2" || { tar -xof "$2" && rm -f "$2"; }; }'
APPEND = 'test "$(sha256sum < "$1" | cut -c1-64)" = "$3" || exit 9; cat "$1" >> "$2" && rm "$1"'
LISTING = 'cd "$1" 2>/dev/null || exit 0; find . -type f -exec sha256sum {} +'

Said = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class LocalFile:
    """A file to send: its path below the folder, with slashes."""

    path: str
    source: Path
    bytes: int
    sha256: str

    @property
    def executable(self) -> bool:
        """Whether it is a program here, and must be one there."""
        return os.access(self.source, os.X_OK)


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What a push did: files and bytes sent, files that were there already, files that were on the device only and were removed."""

    sent: int
    bytes: int
    unchanged: int
    removed: int


def push_tree(transport: Transport, folder: Path, target: str, said: Said = lambda _done, _total: None) -> Pushed:
    """Makes `target` on the device equal to `folder`; `said(done, total)` hears bytes. A link that breaks is tried again, then raised as LinkError."""
    files = local_files(folder)
    shell(transport, 'mkdir -p "$1"', target)
    there = device_files(transport, target)
    changed = [file for file in files if there.get(file.path) != file.sha256]
    wanted = {file.path for file in files} | {file.path + PARTIAL for file in files}
    stale = sorted(there.keys() - wanted)
    _room(transport, target, sum(f.bytes for f in changed))
    _remove(transport, target, stale)
    _make_folders(transport, target, changed)
    total, done = sum(f.bytes for f in changed), 0
    small = [file for file in changed if file.bytes < LARGE]
    for group in _groups(small):
        _push_small(transport, group, target)
        done += sum(f.bytes for f in group)
        said(done, total)
    for file in changed:
        if file.bytes >= LARGE:
            _push_large(transport, file, target, lambda sent, before=done: said(before + sent, total))  # type: ignore[misc]
            done += file.bytes
    _verify(transport, target, files)
    return Pushed(sent=len(changed), bytes=total, unchanged=len(files) - len(changed), removed=len(stale))


def push_file(transport: Transport, source: Path, target: str, said: Callable[[int], None] = lambda _sent: None) -> None:
    """Sends one file of any size, in chunks, resuming what an earlier attempt left. Verified; raises LinkError, TransportError."""
    file = LocalFile(path=posixpath.basename(target), source=source, bytes=source.stat().st_size, sha256=sha256_of(source))
    folder = posixpath.dirname(target)
    shell(transport, 'mkdir -p "$1"', folder)
    _push_large(transport, file, folder, said)


def pull_file(transport: Transport, source: str, target: Path) -> None:
    """Fetches a file whole or not at all, verified by sha256. Raises TransportError when it is not there or arrives damaged."""
    partial = target.with_name(target.name + PARTIAL)
    try:
        for _ in range(ATTEMPTS):
            wanted = shell(transport, HASH, source, seconds=HASHING_SECONDS).strip()
            transport.get(source, partial)
            if sha256_of(partial) == wanted:
                partial.replace(target)
                return
        raise TransportError(f"{transport.name}: {source} arrived damaged {ATTEMPTS} times, or something still writes to it; try again")
    finally:
        partial.unlink(missing_ok=True)


def local_files(folder: Path) -> list[LocalFile]:
    """Returns the files below a folder with their hashes, sorted. Raises TransportError for names that no listing can carry."""
    if not folder.is_dir():
        raise TransportError(f"{folder} is no folder; give one to send")
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or path.name.endswith(PARTIAL):
            continue
        if re.search(r"[\x00-\x1f\\]", name):
            raise TransportError(f"{name!r} has a control character or a backslash in its name; rename it before it is sent")
        found.append(LocalFile(path=name, source=path, bytes=path.stat().st_size, sha256=sha256_of(path)))
    return found


def device_files(transport: Transport, folder: str) -> dict[str, str]:
    """Returns the sha256 of every file below a folder of the device, by path."""
    listing = shell(transport, LISTING, folder, seconds=HASHING_SECONDS)
    lines = (re.fullmatch(r"([0-9a-f]{64})  \./(.+)", line) for line in listing.splitlines())
    return {line[2]: line[1] for line in lines if line}


def free_bytes(transport: Transport, folder: str) -> int | None:
    """Returns the bytes left on the file system that holds a folder of the device, or will hold it; None where df does not tell."""
    script = 'd="$1"; while ! test -d "$d"; do n="$(dirname "$d")"; test "$n" = "$d" && break; d="$n"; done; df -kP "$d" 2>/dev/null || df -k "$d"'
    lines = shell(transport, script, folder).splitlines()
    numbers = re.findall(r"\s([0-9]{1,18})(?=\s)", lines[-1]) if len(lines) > 1 else []
    return int(numbers[2]) * 1024 if len(numbers) > 2 else None


def _room(transport: Transport, target: str, need: int) -> None:
    free = free_bytes(transport, target)
    if free is not None and need + CHUNK > free:
        raise TransportError(
            f"{transport.name}: {byte_text(need)} are to be sent and {byte_text(free)} are free; delete something on the device, or `--clean` it"
        )


def _remove(transport: Transport, target: str, paths: list[str]) -> None:
    for start in range(0, len(paths), 200):  # a command line has an end
        shell(transport, 'cd "$1" && shift && rm -f -- "$@"', target, *paths[start : start + 200])


def _make_folders(transport: Transport, target: str, files: list[LocalFile]) -> None:
    folders = sorted({posixpath.dirname(file.path) or "." for file in files})
    for start in range(0, len(folders), 200):
        shell(transport, 'cd "$1" && shift && mkdir -p -- "$@"', target, *folders[start : start + 200])


def _groups(files: list[LocalFile]) -> Iterator[list[LocalFile]]:
    group: list[LocalFile] = []
    for file in files:
        if group and sum(f.bytes for f in group) + file.bytes > CHUNK:
            yield group
            group = []
        group.append(file)
    if group:
        yield group


def _push_small(transport: Transport, files: list[LocalFile], target: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pack = Path(folder) / "files.tar"
        with tarfile.open(pack, "w", format=tarfile.GNU_FORMAT) as tar:
            for file in files:
                entry = tarfile.TarInfo(file.path)
                entry.size, entry.mode = file.bytes, 0o755 if file.executable else 0o644
                with file.source.open("rb") as data:
                    tar.addfile(entry, data)
        incoming = posixpath.join(target, INCOMING + ".tar")
        _again(lambda: transport.put(pack, incoming))
        _again(lambda: shell(transport, UNPACK, target, INCOMING + ".tar", seconds=HASHING_SECONDS))


def _push_large(transport: Transport, file: LocalFile, folder: str, said: Callable[[int], None]) -> None:
    target = posixpath.join(folder, file.path)
    partial, incoming = target + PARTIAL, posixpath.join(folder, INCOMING)
    _again(lambda: _push_chunks(transport, file, partial, incoming, said))
    script = 'test -e "$1" || : > "$1"; chmod "$3" "$1" && mv "$1" "$2"'
    shell(transport, script, partial, target, "755" if file.executable else "644")
    if shell(transport, HASH, target, seconds=HASHING_SECONDS).strip() != file.sha256:
        shell(transport, 'rm -f "$1"', target)
        raise TransportError(f"{transport.name}: {target} arrived damaged and was removed; send it again")


def _push_chunks(transport: Transport, file: LocalFile, partial: str, incoming: str, said: Callable[[int], None]) -> None:
    """Appends chunk after chunk from where the device's part ends; after a broken link it may be called again."""
    sent = _resume_at(transport, file, partial)
    with tempfile.TemporaryDirectory() as scratch, file.source.open("rb") as data:
        chunk = Path(scratch) / "chunk"
        while sent < file.bytes:
            data.seek(sent)
            chunk.write_bytes(data.read(CHUNK))
            transport.put(chunk, incoming)
            done = transport.run(["sh", "-c", APPEND, "sh", incoming, partial, sha256_of(chunk)], seconds=HASHING_SECONDS)
            _raise_for(transport, done, partial)
            sent += chunk.stat().st_size
            said(sent)


def _raise_for(transport: Transport, done: CommandResult, partial: str) -> None:
    if done.code == 0:
        return
    shell(transport, 'rm -f "$1"', partial)
    reason = "a chunk arrived damaged" if done.code == 9 else last_line(done)
    raise TransportError(f"{transport.name}: {reason}; {partial} was removed")


def _resume_at(transport: Transport, file: LocalFile, partial: str) -> int:
    """Returns how much of a file is there already, right to the byte; what is wrong is removed."""
    said = shell(transport, 'test -f "$1" && wc -c < "$1" || echo 0', partial).strip()
    there = parse_integer(said) or 0
    if there:
        digest = shell(transport, HASH, partial, seconds=HASHING_SECONDS).strip()
        if there > file.bytes or digest != sha256_of(file.source, there):
            shell(transport, 'rm -f "$1"', partial)
            return 0
    return there


def _again(attempt: Callable[[], object]) -> None:
    """Tries until the link holds, a few times."""
    for _ in range(ATTEMPTS - 1):
        with suppress(LinkError):
            attempt()
            return
        time.sleep(PAUSE_SECONDS)
    attempt()


def _verify(transport: Transport, target: str, files: list[LocalFile]) -> None:
    there = device_files(transport, target)
    wrong = [file.path for file in files if there.get(file.path) != file.sha256]
    if wrong:
        raise TransportError(f"{transport.name}: {len(wrong)} files arrived damaged, {wrong[0]} among them; send again")
