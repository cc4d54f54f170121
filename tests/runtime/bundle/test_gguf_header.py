"""GGUF headers that claim too much or what cannot be, or that would end llama.cpp's process (by scripts/checks/fuzz.py gguf-model)."""

from __future__ import annotations

import os
import struct
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.bundle.gguf_gemma4 import check_gguf, check_model, rows_read
from edge_runtime.bundle.gguf_header import GgufError, read_gguf_header
from edge_runtime.errors import BackendError

gguf = pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_runtime.bundle.gguf_header import MIXED, OFFERED, QUANTIZATIONS, TENSOR_TYPES, TYPE_NUMBERS, quantization_name

HEADER = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
KEY = struct.pack("<Q", 1) + b"k"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"GGML" + bytes(100), "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "GGUF version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 8193, 0), "claims 8193 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1025), "claims 0 tensors and 1025 keys"),
        (HEADER + struct.pack("<Q", 1 << 16), "a string claims"),
        (HEADER + struct.pack("<Q", 60_000), "ends after the end"),
        (HEADER + KEY + struct.pack("<IQ", 8, (1 << 20) + 1), "a string claims"),
        (HEADER + KEY + struct.pack("<I", 77), "unknown type 77"),
        (HEADER + KEY + struct.pack("<IIQ", 9, 8, (1 << 22) + 1), "claims 4194305 strings"),
        (HEADER + KEY + struct.pack("<IIQ", 9, 10, 1 << 60), "ends after the end"),
        (HEADER + KEY + struct.pack("<IIQ", 9, 9, 1), "unknown type 9"),
    ],
)
def test_keys(data: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(GgufError, match=sentence):
        read_gguf_header(path)


def tensor_file(path: Path, *infos: bytes) -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, len(infos), 0) + b"".join(infos) + bytes(256))
    return path


def info(*shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return struct.pack("<Q", 1) + b"t" + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def test_a_sound_tensor_is_read(tmp_path: Path) -> None:
    assert read_gguf_header(tensor_file(tmp_path / "good.gguf", info(8))).tensors[0].bytes == 32


@pytest.mark.parametrize(
    ("infos", "sentence"),
    [
        ([info(1 << 40)], "is truncated: 't' ends at byte"),
        ([info(8, offset=1 << 40)], "is truncated"),
        ([info(8, offset=4)], "at offset 4"),
        ([info(0)], r"shape \[0\]"),
        ([info(8, kind=2)], "of type 2"),
        ([info(8, kind=99)], "unknown type 99"),
        ([info(1, 1, 1, 1, 1)], "5 dimensions"),
        ([info(8), info(8)], "occurs twice"),
    ],
)
def test_tensors(infos: list[bytes], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=sentence):
        read_gguf_header(tensor_file(tmp_path / "bad.gguf", *infos))


@pytest.mark.parametrize("number", TENSOR_TYPES)
def test_blocks_are_those_of_ggml(number: int) -> None:
    entry, kind = TENSOR_TYPES[number], gguf.GGMLQuantizationType(number)
    assert (entry.name.upper(), entry.weights, entry.bytes) == (kind.name, *gguf.GGML_QUANT_SIZES[kind])
    # A copy is never smaller than what is stored; at most its scales are wider.
    assert entry.copy_bytes == 0 or 1 <= entry.copy_bytes / entry.bytes < 1.03


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_file_types_are_those_of_llama_cpp(name: str) -> None:
    kind = gguf.LlamaFileType(QUANTIZATIONS[name].file_type)
    assert kind.name in (f"MOSTLY_{name.upper()}", f"ALL_{name.upper()}")
    assert quantization_name(int(kind)) == name


@pytest.mark.parametrize("name", OFFERED)
def test_what_an_export_offers_has_exact_bits(name: str) -> None:
    entry = QUANTIZATIONS[name]
    assert sum(share for _, share in entry.matrices) == pytest.approx(1)
    blocks = {kind: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]] for kind in (*dict(entry.matrices), entry.tables)}
    bits = {kind: 8 * size / weights for kind, (weights, size) in blocks.items()}
    assert entry.file_bytes(1 << 20) == pytest.approx(2**17 * sum(share * bits[kind] for kind, share in entry.matrices), abs=1)
    assert entry.file_bytes(1 << 20, 1 << 20) == pytest.approx(2**17 * bits[entry.tables], abs=1)


def test_bits_of_mixed_files() -> None:
    assert [QUANTIZATIONS[name].file_bytes(80_000) for name in ("q4_0", "q4_k_m", "q5_k_m")] == [45_000, 51_187, 57_125]


def test_other_files_are_mixed() -> None:
    assert [quantization_name(number) for number in (999, None, [1])] == [MIXED] * 3
    assert TYPE_NUMBERS["f32"] == 0


SOUND: dict[str, Any] = {
    "block_count": 4,
    "attention.key_length": 128,
    "rope.dimension_count": 128,
    "attention.key_length_swa": 64,
    "rope.dimension_count_swa": 64,
    "attention.value_length": 128,
    "attention.value_length_swa": 64,
    "attention.head_count": 8,
    "attention.head_count_kv": 2,
    "feed_forward_length": [512, 512, 1024, 1024],
    "attention.shared_kv_layers": 2,
    "attention.sliding_window_pattern": [True, False, True, False],
    "attention.layer_norm_rms_epsilon": 1e-6,
}


def written(
    folder: Path,
    architecture: str = "gemma4",
    tokenizer: str = "gemma4",
    tokens: tuple[bytes, ...] = (b"a", b"b", b""),
    kind: Any = np.float32,
    **changes: Any,
) -> Path:
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {**SOUND, **{name.replace("__", "."): value for name, value in changes.items()}}.items():
        key = f"{architecture}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(list(tokens))
    writer.add_tensor("output_norm.weight", np.ones(32, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_sound_header_passes(tmp_path: Path) -> None:
    assert check_model(written(tmp_path), "gemma4").architecture == "gemma4"
    assert check_model(written(tmp_path, rope__dimension_count_swa=16), "gemma4").keys["gemma4.rope.dimension_count_swa"] == 16


def test_a_vector_that_is_not_float32_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"'output_norm.weight' is a vector that is not float32"):
        check_model(written(tmp_path, kind=np.float16), "gemma4")


def test_code_of_llama_cpp_that_no_bundle_needs_is_not_reached(tmp_path: Path) -> None:
    path = written(tmp_path, architecture="rwkv7")
    assert check_gguf(path).architecture == "rwkv7"  # sound, but no model for us
    with pytest.raises(BackendError, match=r"has the architecture 'rwkv7', not 'gemma4'"):
        check_model(path, "gemma4")
    with pytest.raises(BackendError, match="has the tokenizer 'bert', not gemma4 or none"):
        check_model(written(tmp_path, tokenizer="bert"), "gemma4")


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
    with pytest.raises(BackendError, match=f"{doubles} of its {len(tokens)} tokens occur twice") if doubles else nullcontext():
        check_model(path, "gemma4")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_count": 0}, "block_count is 0, not an integer from 1 to 512"),
        ({"block_count": 513}, "block_count is 513"),
        ({"attention__value_length_swa": 128}, "value_length_swa is 128, not the 64 of a key"),
        ({"attention__sliding_window": 1_358_954_624}, "sliding_window is 1358954624, not an integer from 1 to 1048576"),
        ({"attention__head_count_kv": None}, "head_count_kv is missing"),
        ({"block_count": 3}, "feed_forward_length is .*, or one for each of the 3 layers"),
        ({"vocab_size": 4_000_000_000}, "vocab_size is 4000000000, not an integer from 0 to 1048576"),
        ({"final_logit_softcapping": 1e-4}, "final_logit_softcapping is 9.9.*, not a number from 0.001"),
        ({"final_logit_softcapping": -30.0}, "final_logit_softcapping is -30.0, not a number"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0, not a number"),
        ({"attention__layer_norm_rms_epsilon": -1e-6}, "layer_norm_rms_epsilon is -9.9.*, not a number from 0 to 1"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon is nan"),
        ({"rope__freq_base": 0.0}, "rope.freq_base is 0.0"),
        ({"rope__dimension_count": 129}, "rope.dimension_count is 129, not an even number from 2 to the 128 values of a key"),
        ({"rope__dimension_count": 127}, "rope.dimension_count is 127, not an even number"),
        ({"rope__dimension_count_swa": 4096}, "rope.dimension_count_swa is 4096, not an even number from 2 to the 64 values"),
        ({"rope__dimension_count_swa": 0}, "rope.dimension_count_swa is 0"),
        ({"rope__dimension_count_swa": None}, "rope.dimension_count_swa is 128"),  # left out, it is as in the other layers
        ({"rope__scaling__type": "odd"}, "rope.scaling.type is 'odd', not one of none, linear"),
        ({"attention__head_count_kv": 3}, "head_count_kv is 3, not a divisor"),
        ({"attention__head_count_kv": [2, 2, 2, 0]}, r"head_count_kv is \[2, 2, 2, 0\]"),
        ({"expert_count": 8}, "expert_used_count is None, not a number up to the 8 experts"),
        ({"expert_count": 8, "expert_used_count": 9}, "expert_used_count is 9"),
        ({"expert_used_count": 2}, "expert_used_count is 2, not a number up to the 0 experts"),
        ({"nextn_predict_layers": 5}, "nextn_predict_layers is 5, not an integer from 0 to 4"),
        ({"attention__sliding_window_pattern": [True, False]}, "sliding_window_pattern is .* not a list of 4 booleans"),
        ({"attention__sliding_window_pattern": [False] * 4}, "some of them true"),
        ({"attention__shared_kv_layers": 1}, "shared_kv_layers is 1, not a number that leaves a sliding and a full layer"),
        ({"attention__shared_kv_layers": 3}, "shared_kv_layers is 3"),
    ],
)
def test_numbers_that_llama_cpp_ends_the_process_for_are_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=says):
        check_model(written(tmp_path, **changes), "gemma4")


def test_a_drafter_has_no_rows_of_its_own(tmp_path: Path) -> None:
    shared = {"attention__shared_kv_layers": 4, "nextn_predict_layers": 4, "vocab_size": 64, "tokenizer": "none"}
    assert check_model(written(tmp_path, architecture="gemma4-assistant", **shared), "gemma4-assistant").architecture == "gemma4-assistant"


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"attention__head_count_kv": 4}, False),
        ({"attention__head_count_kv": [2, 2, 1, 2]}, False),
        ({"attention__key_length_swa": 128, "attention__value_length_swa": 128}, False),
        ({"attention__sliding_window_pattern": [True, True, True, True]}, True),
    ],
)
def test_rows_that_a_drafter_reads(changes: dict[str, Any], fits: bool, tmp_path: Path) -> None:
    target = check_model(written(tmp_path), "gemma4")
    shared = {"attention__shared_kv_layers": 4, "vocab_size": 64, "tokenizer": "none"} | changes
    own, others = rows_read(check_model(written(tmp_path, architecture="gemma4-assistant", **shared), "gemma4-assistant"), target)
    assert (own == others) is fits


def test_a_header_is_read_again_only_where_the_file_changed(tmp_path: Path) -> None:
    path = written(tmp_path)
    first = check_gguf(path)
    assert check_model(path, "gemma4") is first
    os.utime(path, ns=(0, 0))
    assert check_gguf(path) is not first
    path.write_bytes(path.read_bytes()[:100])
    for _ in range(2):  # what is wrong is said each time
        with pytest.raises(BackendError, match="truncated"):
            check_gguf(path)
