"""A folder that replaces another: at every moment, one of both is there."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_export import output as output_folder
from edge_export.errors import ExportError

MARKER = "manifest.json"
REPLACEMENTS = 300


def manifest(content: str) -> str:
    return json.dumps({"schema_version": 1, "created_by": f"edge-mtp {content}", "files": [{"path": "weights"}]})


def replace(output: Path, content: str) -> None:
    with output_folder.partial_folder(output, force=True) as folder:
        (folder / MARKER).write_text(manifest(content))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    replace(tmp_path / "bundle", "0")
    return tmp_path / "bundle"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux exchanges two names")
def test_a_reader_finds_a_bundle_at_every_moment(output: Path) -> None:
    (output.parent / "other").mkdir()
    if not output_folder.exchange(output, output.parent / "other"):
        pytest.skip("this file system has no exchange")
    output_folder.exchange(output, output.parent / "other")
    missing, reads, done = 0, 0, threading.Event()

    def read() -> None:
        nonlocal missing, reads
        while not done.is_set():
            missing, reads = missing + (not output.exists()), reads + 1

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(REPLACEMENTS):
        replace(output, str(number))
    done.set()
    reader.join()
    assert (output / MARKER).read_text() == manifest(str(REPLACEMENTS - 1))
    assert reads > 0
    assert missing == 0
    assert sorted(path.name for path in output.parent.iterdir()) == ["bundle", "other"]


class Library:
    """A C library whose renameat2 fails with this code; None: it has no renameat2."""

    def __init__(self, code: int | None) -> None:
        if code is not None:
            self.renameat2 = lambda *_: ctypes.set_errno(code) or -1


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    return lambda code: monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Library(code))


@pytest.mark.parametrize("code", [None, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP])
def test_where_the_system_has_no_exchange_two_renames_do(code: int | None, output: Path, failing: Callable[[int | None], None]) -> None:
    failing(code)
    assert not output_folder.exchange(output, output.parent)
    replace(output, "new")
    assert (output / MARKER).read_text() == manifest("new")
    assert [path.name for path in output.parent.iterdir()] == ["bundle"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux exchanges two names")
def test_an_exchange_that_is_refused_leaves_the_old_bundle(output: Path, failing: Callable[[int | None], None]) -> None:
    failing(errno.EACCES)
    with pytest.raises(ExportError, match="Permission denied"):
        replace(output, "new")
    assert (output / MARKER).read_text() == manifest("0")
    assert [path.name for path in output.parent.iterdir()] == ["bundle"]


def test_files_and_their_names_are_written_to_the_disk(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: written.append(os.fstat(handle).st_ino))
    (output / "weights").write_bytes(b"w")
    output_folder.sync_files(output)
    paths = [output / MARKER, output / "weights", *([] if os.name == "nt" else [output])]
    assert sorted(written) == sorted(path.stat().st_ino for path in paths)
