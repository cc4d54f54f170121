"""What llama.cpp would end the process for is refused before it sees the file; each was found by scripts/fuzz.py gguf-model."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.backends.gguf_check import check_gguf
from edge_runtime.errors import BackendError

gguf = pytest.importorskip("gguf", reason="needs edge-mtp[export]")

SOUND = {
    "block_count": 4, "attention.key_length": 128, "rope.dimension_count": 128, "attention.key_length_swa": 64, "rope.dimension_count_swa": 64,
}  # fmt: skip


def written(folder: Path, **changes: int | None) -> Path:
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "gemma4")
    for name, value in {**SOUND, **{name.replace("__", "."): value for name, value in changes.items()}}.items():
        if value is not None:
            writer.add_uint32(f"gemma4.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_vector_that_is_not_float32_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for kind, says in ((np.float32, None), (np.float16, "'output_norm.weight' is a vector that is not float32")):
        writer = gguf.GGUFWriter(path, "gemma4")
        writer.add_tensor("output_norm.weight", np.ones(32, kind))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(BackendError, match=says) if says else nullcontext():
            check_gguf(path)


def test_a_sound_header_passes(tmp_path: Path) -> None:
    assert check_gguf(written(tmp_path)).architecture == "gemma4"
    assert check_gguf(written(tmp_path, rope__dimension_count_swa=16)).keys["gemma4.rope.dimension_count_swa"] == 16


@pytest.mark.parametrize("layers", [0, 513, 4_000_000_000])
def test_layers_beyond_llama_cpp_s_are_refused(layers: int, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=f"has {layers} layers, llama.cpp takes 1 to 512"):
        check_gguf(written(tmp_path, block_count=layers))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope__dimension_count": 129}, "rotates 129 of 128"),
        ({"rope__dimension_count_swa": 4096}, "rotates 4096 of 64"),
        ({"rope__dimension_count_swa": None}, "rotates 128 of 64"),  # left out, it is as in the other layers
    ],
)
def test_more_rotated_values_than_a_head_has_are_refused(changes: dict[str, int | None], says: str, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=says):
        check_gguf(written(tmp_path, **changes))
