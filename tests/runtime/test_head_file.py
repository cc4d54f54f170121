"""The head file is believed only where it was checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.backends.head_file import MAX_HEADER_BYTES, read_head
from edge_runtime.errors import BackendError
from tiny_head import SIZES, TOP, VOCABULARY, head_arrays, head_header, write_head_file


@pytest.mark.parametrize("bfloat16", [False, True])
def test_what_was_written_is_read(tmp_path: Path, bfloat16: bool) -> None:
    arrays = head_arrays(bfloat16=bfloat16)
    weights = read_head(write_head_file(tmp_path / "head", arrays), **SIZES)
    for name, array in arrays.items():
        found = getattr(weights, name)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array), name
        assert not found.flags.writeable
    assert weights.top_centroids == TOP


def no_metadata(header: dict[str, Any]) -> None:
    del header["__metadata__"]


def other_format(header: dict[str, Any]) -> None:
    header["__metadata__"]["format"] = "edge-mtp drafter head 2"


def top(value: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        header["__metadata__"]["top_centroids"] = value

    return change


def tensor(name: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        header[name] = {**header[name], **fields}

    return change


def missing(name: str) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        del header[name]

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (no_metadata, "is no head file of this version"),
        (other_format, "is no head file of this version"),
        (top("0"), "top_centroids is '0', not a number from 1 to 6"),
        (top("7"), "top_centroids is '7'"),
        (top("9" * 5000), "top_centroids is '9999"),
        (top("²"), "top_centroids"),
        (top(2), "top_centroids"),
        (missing("rows"), "rows have the shape None"),
        (missing("feedback"), "feedback is None None, not F32"),
        (tensor("rows", shape=[6, 5, 5]), "rows have the shape"),
        (tensor("rows", shape=[5, 5, 4]), "rows have the shape"),
        (tensor("rows", shape=[1 << 60, 1 << 60, 4]), "rows have the shape"),
        (tensor("rows", shape=[6, -5, 4]), "rows have the shape"),
        (tensor("rows", dtype="F64"), "rows is 'F64'"),
        (tensor("centroids", dtype=["F32"]), "centroids is"),
        (tensor("centroids", shape=[4, 6]), "centroids is 'F32'"),
        (tensor("centroids", shape=None), "centroids is"),
        (tensor("feedback", data_offsets=[0, 60]), "which are not 64 bytes"),
        (tensor("feedback", data_offsets=[-64, 0]), "which are not 64 bytes"),
        (tensor("feedback", data_offsets=[1, 65]), "which are not 64 bytes"),
        (tensor("feedback", data_offsets=[1 << 40, (1 << 40) + 64]), "is cut short"),
        (tensor("feedback", data_offsets="x"), "which are not 64 bytes"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None], words: str) -> None:
    arrays = head_arrays()
    header = head_header(arrays)
    change(header)
    with pytest.raises(BackendError, match=words):
        read_head(write_head_file(tmp_path / "head", arrays, header), **SIZES)


@pytest.mark.parametrize(("field", "value"), [("hidden_size", 6), ("target_hidden_size", 12), ("vocabulary", VOCABULARY * 2)])
def test_the_head_of_another_pair_is_refused(tmp_path: Path, field: str, value: int) -> None:
    with pytest.raises(BackendError, match="export the bundle again"):
        read_head(write_head_file(tmp_path / "head", head_arrays()), **{**SIZES, field: value})


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, 3])
def test_an_order_that_does_not_name_every_token_once_is_refused(tmp_path: Path, wrong: int) -> None:
    arrays = head_arrays()
    order = arrays["token_ordering"].reshape(-1)
    order[np.flatnonzero(order != 3)[0]] = wrong
    with pytest.raises(BackendError, match=f"does not name each of {VOCABULARY} tokens once"):
        read_head(write_head_file(tmp_path / "head", arrays), **SIZES)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"1234567", (5).to_bytes(8, "little"), (1 << 62).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{x", (2).to_bytes(8, "little") + b"\xff\xff", (5000).to_bytes(8, "little") + b"[" * 5000,
        (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b" " * (MAX_HEADER_BYTES + 1),
    ],
)  # fmt: skip
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "head"
    path.write_bytes(content)
    with pytest.raises(BackendError, match="export the bundle again"):
        read_head(path, **SIZES)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = write_head_file(tmp_path / "head", head_arrays())
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(BackendError):
            read_head(path, **SIZES)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="cannot be read"):
        read_head(tmp_path / "head", **SIZES)
