"""Atomic writes, and the stale temporary files of killed processes that the next write removes."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_bench.measure.records import RecordFile
from edge_devices.errors import EdgeError
from edge_devices.files.atomic_write import atomic_write, locked, stale_of, temporary_of, unforeseen_temporary_of, write_text
from edge_devices.files.user_cache import cache_put, read_entries
from polling import dead_process


def test_the_file_is_its_owner_s_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, [b"a", b"bc"])
    assert path.read_bytes() == b"abc"
    assert path.stat().st_mode & 0o777 == 0o600
    atomic_write(path, [b"new"], mode=0o644)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o644)
    assert [result.name for result in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device"), MemoryError()])
def test_the_old_file_survives_a_failed_write(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def parts() -> Iterator[bytes]:
        yield b"half"
        raise error

    with pytest.raises(type(error)):
        atomic_write(path, parts())
    assert path.read_bytes() == b"old"
    assert [result.name for result in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            atomic_write(tmp_path / "file", [b"x" * 5000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_stale_files_of_dead_processes_go_and_those_of_running_ones_stay(tmp_path: Path) -> None:
    path, dead = tmp_path / "file", dead_process()
    (tmp_path / f".file.partial-{dead}").write_bytes(b"half")
    (tmp_path / f".file.partial-{os.getppid()}").write_bytes(b"being written")
    (tmp_path / f".file.partial-{dead}x").write_bytes(b"something else")
    (tmp_path / f".other.partial-{dead}").write_bytes(b"another file's")
    (tmp_path / ".file.partial-999999999999").symlink_to(tmp_path)
    assert [result.name for result in stale_of(path)] == [f".file.partial-{dead}"]
    atomic_write(path, [b"new"])
    assert not (tmp_path / f".file.partial-{dead}").exists()
    assert len(list(tmp_path.iterdir())) == 5


def test_a_stale_file_whose_process_number_is_reused_goes_once_it_is_unlocked(tmp_path: Path) -> None:
    path, running = tmp_path / "file", os.getppid()
    folder = tmp_path / f".file.partial-{running}"
    folder.mkdir()
    with locked(folder):
        os.utime(folder, (0, 0))
        assert list(stale_of(path)) == []
    assert list(stale_of(path)) == [folder]
    os.utime(folder)
    assert list(stale_of(path)) == []


def test_a_locked_file_is_not_stale_though_its_process_number_differs_here(tmp_path: Path) -> None:
    path, file = tmp_path / "file", tmp_path / f".file.partial-{dead_process()}"
    file.write_bytes(b"being written in another container")
    with locked(file):
        assert list(stale_of(path)) == []
    assert list(stale_of(path)) == [file]


def test_a_process_killed_while_it_writes_leaves_what_the_next_one_removes(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from edge_devices.files.atomic_write import atomic_write
def parts():
    yield b"half"
    os.kill(os.getpid(), signal.SIGKILL)
atomic_write(Path({str(tmp_path / "costs.json")!r}), parts())
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == -9
    assert len(list(tmp_path.iterdir())) == 1
    assert cache_put(tmp_path / "costs.json", "key", 5) is None
    assert read_entries(tmp_path / "costs.json") == {"key": 5}
    assert [result.name for result in tmp_path.iterdir()] == ["costs.json"]


Writer = Callable[[Path], None]


def as_bytes(path: Path) -> None:
    atomic_write(path, [b"new\n"])


def as_text(path: Path) -> None:
    write_text(path, ["ne", "w\n"])


def by_records(path: Path) -> None:
    RecordFile(path)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")


@pytest.mark.parametrize("write", [as_bytes, as_text, by_records])
@pytest.mark.parametrize("make", [pipe, device, Path.mkdir])
@pytest.mark.parametrize("through_link", [False, True])
def test_what_is_no_regular_file_stays(tmp_path: Path, write: Writer, make: Writer, through_link: bool) -> None:
    make(tmp_path / "there")
    (tmp_path / "link").symlink_to("there")
    kind = (tmp_path / "there").stat().st_mode
    with pytest.raises((OSError, EdgeError), match="not a regular file"):
        write(tmp_path / ("link" if through_link else "there"))
    assert (tmp_path / "there").stat().st_mode == kind
    assert sorted(result.name for result in tmp_path.iterdir()) == ["link", "there"]


@pytest.mark.parametrize("write", [as_bytes, as_text])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_is_written_through(tmp_path: Path, write: Writer, dangling: bool) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/file")
    if not dangling:
        (tmp_path / "folder/file").write_bytes(b"old")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder/file").read_bytes() == b"new\n"
    assert [result.name for result in (tmp_path / "folder").iterdir()] == ["file"]


def test_a_planted_link_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write to the folder could plant one, if the name were foreseen."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    monkeypatch.setattr("secrets.token_hex", lambda _: "00")
    (tmp_path / f".file.partial-{os.getpid()}-00").symlink_to(victim)
    with pytest.raises(FileExistsError):
        atomic_write(tmp_path / "file", [b"new"])
    assert victim.read_bytes() == b"precious"
    monkeypatch.undo()
    assert unforeseen_temporary_of(tmp_path / "file") != unforeseen_temporary_of(tmp_path / "file")


def test_two_writes_at_once_of_one_process_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def outer() -> Iterator[bytes]:
        yield b"outer"
        atomic_write(path, [b"inner"])
        assert path.read_bytes() == b"inner"

    atomic_write(path, outer())
    assert path.read_bytes() == b"outer"
    assert [result.name for result in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("write", [as_bytes, as_text])
def test_a_link_to_itself_is_an_error(tmp_path: Path, write: Writer) -> None:
    (tmp_path / "link").symlink_to("link")
    with pytest.raises((OSError, EdgeError), match="symbolic links"):
        write(tmp_path / "link")


def test_a_path_without_a_name_is_an_os_error() -> None:
    with pytest.raises(OSError, match=r"\."):
        atomic_write(Path(), [b"x"])
    assert not temporary_of(Path()).exists()
