"""Weights and tokenizers of checkpoints made by hand become a GGUF file: no torch needed."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import struct
import tracemalloc
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny_members import write_tokenizer

pytest.importorskip("gguf")

from edge_export.checkpoint import safetensors as safetensors_file
from edge_export.checkpoint.architecture import needed_shapes, parse_architecture
from edge_export.checkpoint.checkpoint import open_checkpoint
from edge_export.checkpoint.safetensors import PIECE_VALUES, StoredTensor, read_rows, read_stored, read_values
from edge_export.errors import CheckpointError
from edge_export.gguf.keys import read_card
from edge_export.gguf.writer import write_gguf

CONFIG: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 32,
    "max_position_embeddings": 256,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
# Of the file below, written with gguf 0.19. It changes only when a file that was already right would change.
GOLDEN = "f8823373fedc4aa48c65f50600355a37dd14914556a62377e45a5b18fcb58a67"


def write_by_hand(folder: Path, config: dict[str, Any] = CONFIG, scale: float = 1.0) -> Path:
    """A checkpoint whose float32 weights are scale * (1, 2, 3, ...) / 256 in the order of the names."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header, data = {}, b""
    for name, shape in sorted(needed_shapes(parse_architecture(config, folder)).items()):
        values = (np.arange(1, prod(shape) + 1, dtype=np.float32) / 256 * np.float32(scale)).tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    write_tokenizer(folder)
    return folder


def stored(path: Path, values: np.ndarray[Any, Any], dtype: str) -> StoredTensor:
    path.write_bytes(b"skipped!" + values.tobytes())
    return StoredTensor(name="w", path=path, dtype=dtype, shape=values.shape, offset=8, bytes=values.nbytes)


def test_golden_file(tmp_path: Path) -> None:
    folder = write_by_hand(tmp_path / "golden")
    write_gguf(open_checkpoint(folder), tmp_path / "golden.gguf", "bf16", lambda _: None)
    assert hashlib.sha256((tmp_path / "golden.gguf").read_bytes()).hexdigest() == GOLDEN


def test_pieces_are_whole_rows_and_join_up(tmp_path: Path) -> None:
    columns = PIECE_VALUES // 2
    halves = np.resize(np.arange(2048, dtype=np.float16), (5, columns)) / 3
    pieces = list(read_rows(stored(tmp_path / "w", halves, "F16")))
    assert [piece.shape for piece in pieces] == [(2, columns), (2, columns), (1, columns)]
    assert np.array_equal(np.concatenate(pieces), halves.astype(np.float32))
    longer = np.arange(2 * (PIECE_VALUES + 1), dtype=np.int64).reshape(2, -1)
    pieces = list(read_stored(stored(tmp_path / "w", longer, "I64")))
    assert [piece.shape for piece in pieces] == [(1, PIECE_VALUES + 1)] * 2
    assert np.array_equal(np.concatenate(pieces), longer)
    vector = stored(tmp_path / "vector", np.arange(PIECE_VALUES + 2, dtype=np.float32), "F32")
    assert [len(piece) for piece in read_rows(vector)] == [PIECE_VALUES, 2]
    for shape in ((0, 3), (3, 0), ()):
        values = np.ones(shape, np.float32)
        assert np.array_equal(read_values(stored(tmp_path / "few", values, "F32")), values)


def test_bfloat16_source_is_exact(tmp_path: Path) -> None:
    bits = np.arange(0, 1 << 16, dtype=np.uint16)
    bits = bits[bits & 0x7F80 != 0x7F80]  # numbers that are not finite are refused
    tensor = stored(tmp_path / "w", bits, "BF16")
    assert np.array_equal(np.concatenate(list(read_rows(tensor, "bf16"))).view(np.uint16), bits)
    widened = np.concatenate(list(read_rows(tensor)))
    assert np.array_equal(widened.view(np.uint32), bits.astype(np.uint32) << 16)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'w' is I64"):
        list(read_rows(stored(tmp_path / "w", np.ones(4, np.int64), "I64")))


def test_file_cut_while_it_is_read(tmp_path: Path) -> None:
    tensor = stored(tmp_path / "w", np.ones(100, np.float32), "F32")
    (tmp_path / "w").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="ended inside 'w'"):
        list(read_rows(tensor, "f16"))


def test_float16_overflow_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_by_hand(tmp_path / "large", scale=1e4))
    with pytest.raises(CheckpointError, match="beyond float16; export with bf16 or f32"):
        write_gguf(checkpoint, tmp_path / "large.gguf", "f16", lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["large"]


def test_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "PIECE_VALUES", 1 << 14)
    checkpoint = open_checkpoint(write_by_hand(tmp_path / "wide", CONFIG | {"intermediate_size": 1 << 15}))
    tracemalloc.start()
    write_gguf(checkpoint, tmp_path / "wide.gguf", "bf16", lambda _: None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "wide.gguf").stat().st_size > 12 << 20
    assert peak < 2 << 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["model"].update(type="Unigram"), "not a BPE tokenizer with byte fallback"),
        (lambda t: t["model"].update(merges=[]), "has no merges"),
        (lambda t: t["model"].update(merges=[["a"]]), "not a pair of pieces"),
        (lambda t: t["model"]["vocab"].update({"new": 512}), "has 513 tokens, the model 512"),
        (lambda t: t["model"]["vocab"].update({"new": 600}), "leaves a hole or is taken"),
        (lambda t: t["model"]["vocab"].update({"new": 3}), "leaves a hole or is taken"),
        (lambda t: t["model"]["vocab"].update({"new": -1}), "no vocabulary of pieces and ids"),
        (lambda t: t["added_tokens"].append({"id": 7}), "added tokens without a text or an id"),
    ],
)
def test_broken_tokenizer(change: Any, message: str, tmp_path: Path) -> None:
    folder = write_by_hand(tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    change(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=message):
        write_gguf(open_checkpoint(folder), tmp_path / "out.gguf", "f32", lambda _: None)


LAUGHS = "".join(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in itertools.pairwise("abcdefghijklm"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("README.md", "---\ntags: [a\n---\n", ""),
        ("README.md", "---\nlicense: {a: 1}\n---\n", ""),
        ("README.md", "---\nversion: 0x" + "f" * 9000 + "\n---\n", ""),
        ("README.md", "---\nname: 1:" + "1:" * 9000 + "1.5\n---\n", ""),
        ("README.md", f"---\na: &a [lol]\n{LAUGHS}license: *m\n---\n", ""),
        ("README.md", "---\na: " + "[" * 50_000 + "]" * 50_000 + "\n---\n", ""),
        ("README.md", "---\n" + "a: 1\n" * 100_000, ""),
        ("generation_config.json", "[" * 100_000, "is not JSON"),
        ("generation_config.json", " " * (2 << 20), "more than the 1048576"),
    ],
    ids=["no YAML", "object", "digits", "float", "billion laughs", "deep", "long", "deep JSON", "large JSON"],
)
def test_an_unusable_model_card_or_generation_config(name: str, text: str, message: str, tmp_path: Path) -> None:
    folder = write_by_hand(tmp_path / "model")
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}.*{message}"):
        write_gguf(open_checkpoint(folder), tmp_path / "out.gguf", "f32", lambda _: None)
    assert not list(tmp_path.glob("out.gguf*"))


def test_no_more_of_a_model_card_is_read_than_its_front_matter_may_have(tmp_path: Path) -> None:
    with (tmp_path / "README.md").open("wb") as file:
        file.write(b"---\nlicense: mit\ntags: [a]\n---\n")
        file.truncate(1 << 40)
    assert read_card(tmp_path) == {"license": "mit", "tags": ["a"]}
