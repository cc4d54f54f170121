"""What the kernels' drafter maps: tensors of a GGUF and of a head file have the bytes of the file, and what does not fit is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
gguf = pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_runtime.backends.llama import drafter as kernel_drafter
from edge_runtime.backends.llama.drafter import HeadWeights, MappedGguf, MappedTensor, read_head
from edge_runtime.bundle.gguf_gemma4 import check_gguf
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


COUNT, WIDTH = 11, 512
NAME = "token_embd.weight"
# Types of the token embedding after llama.cpp's quantization.
TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


def random_blocks(kind: Any) -> Any:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return np.random.default_rng(1).integers(0, 256, size=(COUNT, WIDTH // block * size), dtype=np.uint8)


def opened(path: Path, tensor: str = NAME, count: int = COUNT, width: int = WIDTH) -> MappedTensor:
    return MappedGguf(path).tensor(tensor, (width, count))


def write(path: Path, kind: Any, data: Any) -> Path:
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_tensor("before", np.ones(3, np.float32))
    writer.add_tensor(NAME, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", TYPES)
def test_rows_are_bit_for_bit_gguf_s(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    data = random_blocks(kind)
    tensor = opened(write(tmp_path / "model.gguf", kind, data))
    assert (tensor.kind, tensor.shape) == (kind, (WIDTH, COUNT))
    assert tensor.data.tobytes() == data.tobytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    kind = gguf.GGMLQuantizationType.Q8_0
    return write(tmp_path / "model.gguf", kind, random_blocks(kind))


@pytest.mark.parametrize(
    ("tensor", "count", "width", "words"),
    [("output.weight", COUNT, WIDTH, "no tensor output.weight"), (NAME, COUNT + 1, WIDTH, "not"), (NAME, COUNT, WIDTH * 2, "not")],
)
def test_another_tensor_is_refused(path: Path, tensor: str, count: int, width: int, words: str) -> None:
    with pytest.raises(BackendError, match=words):
        opened(path, tensor, count, width)


def test_a_type_that_cannot_be_multiplied_is_refused(tmp_path: Path) -> None:
    numbers = np.zeros((COUNT, WIDTH), np.int32)
    with pytest.raises(BackendError, match="is i32, not f32"):
        opened(write(tmp_path / "model.gguf", gguf.GGMLQuantizationType.I32, numbers))


def test_a_truncated_or_foreign_file_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    with pytest.raises(BackendError, match=r"is truncated|cannot read"):
        opened(path)
    path.write_bytes(b"GGUF" + b"\xff" * 64)
    with pytest.raises(BackendError, match=r"corrupt|version"):
        opened(path)


@pytest.mark.parametrize(("left", "words"), [(-200, "was cut"), (0, "cannot be mapped")])
def test_a_file_that_is_cut_behind_its_check_is_refused(path: Path, left: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(path: Path) -> Any:
        header = check_gguf(path)
        path.write_bytes(path.read_bytes()[:left])
        return header

    monkeypatch.setattr(kernel_drafter, "check_gguf", cut)
    with pytest.raises(BackendError, match=words):
        MappedGguf(path)
