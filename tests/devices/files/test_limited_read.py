"""Files that people name: read to the end, if that is near; and numbers of few digits."""

from __future__ import annotations

import hashlib
import os
import threading
import tracemalloc
from pathlib import Path

import pytest

from edge_devices.files.limited_read import FileTooLarge, lines_at_most, parse_integer, read_at_most, read_regular, sha256_of

ZERO = Path("/dev/zero")


def test_a_file_of_the_limit_is_read_and_one_byte_more_is_not(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_at_most(path, 5) == b"12345"
    with pytest.raises(OSError, match="it has more than 4 bytes"):
        read_at_most(path, 4)


@pytest.mark.skipif(not ZERO.exists(), reason="needs /dev/zero")
def test_an_endless_file_is_left():
    tracemalloc.start()
    try:
        with pytest.raises(OSError, match="it has more than 5000000 bytes"):
            read_at_most(ZERO, 5_000_000)
        assert tracemalloc.get_traced_memory()[1] < 7_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_read_to_its_end(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = b"word " * 50_000
    writer = threading.Thread(target=pipe.write_bytes, args=(text,))
    writer.start()
    try:
        assert read_at_most(pipe, 1 << 20) == text
    finally:
        writer.join()


def test_a_path_that_cannot_be_is_a_file_that_cannot_be_read():
    with pytest.raises(OSError, match="null"):
        read_at_most(Path("a\0b"), 5)


def test_a_regular_file_is_held_once_and_no_longer_than_it_may_be(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5_000_000)
    for read in (read_at_most, read_regular):
        tracemalloc.start()
        try:
            assert len(read(path, 5_000_000)) == 5_000_000
            assert tracemalloc.get_traced_memory()[1] < 6_200_000
        finally:
            tracemalloc.stop()
        with pytest.raises(FileTooLarge, match="it has more than 4999999 bytes"):
            read(path, 4_999_999)


def test_lines_are_measured_and_counted(tmp_path):
    path = tmp_path / "lines"
    path.write_text("abcd\nef\n")
    with path.open() as file:
        assert list(lines_at_most(file, 5, 3)) == ["abcd\n", "ef\n"]
    with path.open() as file, pytest.raises(OSError, match="line 1 has more than 4 characters"):
        list(lines_at_most(file, 4, 3))
    with path.open() as file, pytest.raises(OSError, match="it has more than 1 lines"):
        list(lines_at_most(file, 10, 1))


DATA = bytes(range(256)) * 9000  # more than two pieces


@pytest.mark.parametrize("length", [None, 0, 1, 1 << 20, len(DATA), len(DATA) + 1])
def test_a_file_and_its_beginning(tmp_path: Path, length: int | None) -> None:
    path, done = tmp_path / "file", []
    path.write_bytes(DATA)
    assert sha256_of(path, length, done.append) == hashlib.sha256(DATA[:length]).hexdigest()
    assert sum(done) == len(DATA[:length])


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("137", 137), ("9" * 18, 10**18 - 1), ("007", 7)])
def test_up_to_18_digits_are_a_number(text: str, number: int) -> None:
    assert parse_integer(text) == number


@pytest.mark.parametrize("text", ["", "-1", "+1", " 1", "1 ", "1.0", "1_0", "0x1", "１", "²", "9" * 19])
def test_any_other_text_is_no_number(text: str) -> None:
    assert parse_integer(text) is None
