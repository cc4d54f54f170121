"""The head file is believed only where it was checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
gguf = pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_runtime.backends.llama.drafter import HeadWeights, read_head
from edge_runtime.errors import BackendError

CENTROIDS, PER_CENTROID, HIDDEN, TOP = 6, 5, 32, 2
VOCABULARY = CENTROIDS * PER_CENTROID
SIZES = {"hidden_size": HIDDEN, "vocabulary": VOCABULARY}
KEYS = {"drafter_head.format": 3, "drafter_head.top_centroids": TOP}


def head_arrays() -> dict[str, Any]:
    """The tensors of a random head, in the order of the file."""
    random = np.random.default_rng(0)
    return {
        "rows": random.normal(size=(CENTROIDS, PER_CENTROID, HIDDEN)).astype(np.float16),
        "token_ordering": random.permutation(VOCABULARY).astype(np.int32).reshape(CENTROIDS, PER_CENTROID),
        "centroids": random.normal(size=(CENTROIDS, HIDDEN)).astype(np.float16),
    }


def write_head_file(path: Path, arrays: Mapping[str, Any], keys: Mapping[str, Any] = KEYS) -> Path:
    writer = gguf.GGUFWriter(path, "edge-mtp-drafter-head")
    for key, value in keys.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_string)(key, value)
    for name, array in arrays.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path, **changes: int) -> HeadWeights:
    return read_head(path, **{**SIZES, **changes})


def test_what_was_written_is_read(tmp_path: Path) -> None:
    arrays = head_arrays()
    weights = read(write_head_file(tmp_path / "head", arrays))
    assert weights.top_centroids == TOP
    assert np.array_equal(weights.token_ordering, arrays.pop("token_ordering"))
    for name, array in arrays.items():
        result = getattr(weights, name)
        assert result.shape == array.shape[::-1]
        assert result.data.tobytes() == array.tobytes(), name
        assert not result.data.flags.writeable


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"drafter_head.format": 4}, "is no head file of this version"),
        ({"drafter_head.format": "2"}, "is no head file of this version"),
        ({"drafter_head.top_centroids": 0}, "top_centroids is 0, not a number from 1 to 6"),
        ({"drafter_head.top_centroids": 7}, "top_centroids is 7"),
        ({"drafter_head.top_centroids": "2"}, "top_centroids is 2, not a number"),
    ],
)
def test_keys_that_lie_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BackendError, match=words):
        read(write_head_file(tmp_path / "head", head_arrays(), KEYS | changes))


@pytest.mark.parametrize("name", ["rows", "token_ordering", "centroids"])
def test_a_tensor_that_is_missing_misshapen_or_of_another_type_is_refused(tmp_path: Path, name: str) -> None:
    arrays = head_arrays()
    wrong = {"cut": arrays[name][:-1], "typed": arrays[name].astype(np.int8)}
    del arrays[name]
    for case in ({}, {name: wrong["cut"]}, {name: wrong["typed"]}):
        with pytest.raises(BackendError, match=f"{name}.*export the (pair|bundle) again"):
            read(write_head_file(tmp_path / "head", arrays | case))


@pytest.mark.parametrize(("field", "value"), [("hidden_size", 64), ("vocabulary", VOCABULARY * 2)])
def test_the_head_of_another_pair_is_refused(tmp_path: Path, field: str, value: int) -> None:
    with pytest.raises(BackendError, match=r"export the (pair|bundle) again"):
        read(write_head_file(tmp_path / "head", head_arrays()), **{field: value})


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, 3])
def test_an_order_that_does_not_name_every_token_once_is_refused(tmp_path: Path, wrong: int) -> None:
    arrays = head_arrays()
    order = arrays["token_ordering"].reshape(-1)
    order[np.flatnonzero(order != 3)[0]] = wrong
    with pytest.raises(BackendError, match=f"does not name each of {VOCABULARY} tokens once"):
        read(write_head_file(tmp_path / "head", arrays))
