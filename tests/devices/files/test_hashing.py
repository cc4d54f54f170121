"""The sha256 of files and of their beginnings."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from edge_devices.files.limited_read import sha256_of

DATA = bytes(range(256)) * 9000  # more than two pieces


@pytest.mark.parametrize("length", [None, 0, 1, 1 << 20, len(DATA), len(DATA) + 1])
def test_a_file_and_its_beginning(tmp_path: Path, length: int | None) -> None:
    path, done = tmp_path / "file", []
    path.write_bytes(DATA)
    assert sha256_of(path, length, done.append) == hashlib.sha256(DATA[:length]).hexdigest()
    assert sum(done) == len(DATA[:length])
