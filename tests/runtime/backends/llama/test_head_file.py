"""The head file is believed only where it was checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_runtime.backends.llama.drafter import HeadWeights, read_head
from edge_runtime.errors import BackendError
from tiny_head import KEYS, SIZES, TOP, VOCABULARY, head_arrays, write_head_file, write_tensors


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
            read(write_tensors(tmp_path / "head", arrays | case, KEYS, {}))


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
