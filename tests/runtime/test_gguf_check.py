"""What llama.cpp would end the process for is refused before it sees the file; each was found by scripts/fuzz.py gguf-model."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.backends.gguf_check import check_gguf, check_model
from edge_runtime.errors import BackendError

gguf = pytest.importorskip("gguf", reason="needs edge-mtp[export]")

SOUND = {
    "block_count": 4, "attention.key_length": 128, "rope.dimension_count": 128, "attention.key_length_swa": 64, "rope.dimension_count_swa": 64,
}  # fmt: skip


def written(
    folder: Path, architecture: str = "gemma4", tokenizer: str = "gemma4", tokens: tuple[bytes, ...] = (b"a", b"b", b""), kind: Any = np.float32,
    **changes: int | None,
) -> Path:  # fmt: skip
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {**SOUND, **{name.replace("__", "."): value for name, value in changes.items()}}.items():
        if value is not None:
            writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(list(tokens))
    writer.add_tensor("output_norm.weight", np.ones(32, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_sound_header_passes(tmp_path: Path) -> None:
    assert check_model(written(tmp_path)).architecture == "gemma4"
    assert check_model(written(tmp_path, architecture="gemma4-assistant", tokenizer="none", vocab_size=64)).tensors
    assert check_model(written(tmp_path, rope__dimension_count_swa=16)).keys["gemma4.rope.dimension_count_swa"] == 16


def test_a_vector_that_is_not_float32_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"'output_norm.weight' is a vector that is not float32"):
        check_model(written(tmp_path, kind=np.float16))


def test_code_of_llama_cpp_that_no_bundle_needs_is_not_reached(tmp_path: Path) -> None:
    path = written(tmp_path, architecture="rwkv7")
    assert check_gguf(path).architecture == "rwkv7"  # sound, but no model for us
    with pytest.raises(BackendError, match=r"has the architecture 'rwkv7', not gemma4 or gemma4-assistant"):
        check_model(path)
    with pytest.raises(BackendError, match="has the tokenizer 'bert', not gemma4 or none"):
        check_model(written(tmp_path, tokenizer="bert"))
    with pytest.raises(BackendError, match="claims 4000000000 tokens, more than 1048576"):
        check_model(written(tmp_path, tokenizer="none", vocab_size=4_000_000_000))


@pytest.mark.parametrize(
    ("tokens", "doubles"),
    [
        ((b"a", b"b", b"a"), 1),
        ((b"a", b"b\0c", b"b\0d", b"b"), 2),  # C reads no further than NUL
        ((b"", b"x", b"[EMPTY_0]"), 1),  # llama.cpp's name for an empty one
        ((b"", b"", b"\0"), 0),
        (tuple(b"%d" % (index // 2) for index in range(200_000)), 100_000),  # more than are read at once
    ],
)
def test_tokens_that_stand_twice_are_refused(tokens: tuple[bytes, ...], doubles: int, tmp_path: Path) -> None:
    path = written(tmp_path, tokens=tokens)
    with pytest.raises(BackendError, match=f"{doubles} of its {len(tokens)} tokens stand there twice") if doubles else nullcontext():
        check_model(path)


@pytest.mark.parametrize("layers", [0, 513, 4_000_000_000])
def test_layers_beyond_llama_cpp_s_are_refused(layers: int, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=f"has {layers} layers, llama.cpp takes 1 to 512"):
        check_model(written(tmp_path, block_count=layers))


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
        check_model(written(tmp_path, **changes))
