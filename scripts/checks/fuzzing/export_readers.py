"""The exporter's readers: checkpoints, tokenizers, existing GGUF files, importance matrices."""

from __future__ import annotations

from pathlib import Path

import gguf

from edge_export.checkpoint.checkpoint import open_checkpoint, open_gguf
from edge_export.checkpoint.safetensors import READABLE, SOURCE_TYPE, read_rows, read_stored, stored_tensors
from edge_export.checkpoint.tokenizer_vocabulary import read_vocabulary
from edge_export.errors import CheckpointError
from edge_export.gguf.keys import CARD_NAME, unfit_values
from edge_export.gguf.writer import add_general
from edge_export.quantization.importance import read_imatrix
from fuzzing.readers import PARSED, Read, Reader, corpus, from_file


def _safetensors(path: Path) -> None:
    for tensor in stored_tensors(path.parent).values():
        if tensor.dtype in SOURCE_TYPE:
            for _ in read_rows(tensor):
                pass
        elif tensor.dtype in READABLE:
            for _ in read_stored(tensor):
                pass


def _index(folder: Path, _: object) -> Read:
    (folder / "model-00001-of-00002.safetensors").write_bytes(corpus("safetensors")[0])
    (folder / "model-00002-of-00002.safetensors").write_bytes(corpus("safetensors")[1])
    path = folder / "model.safetensors.index.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        stored_tensors(folder)

    return read


def _config(folder: Path, _: object) -> Read:
    (folder / "model.safetensors").write_bytes(corpus("safetensors")[0])

    def read(data: bytes) -> None:
        (folder / "config.json").write_bytes(data)
        try:
            open_checkpoint(folder)
        except CheckpointError as error:
            if "lacks the tensor" not in str(error):  # a sound config: its weights are not kept in the corpus
                raise

    return read


def _tokenizer_settings(folder: Path, _: object) -> Read:
    (folder / "tokenizer.json").write_bytes(corpus("tokenizer")[0])

    def read(data: bytes) -> None:
        (folder / "tokenizer_config.json").write_bytes(data)
        read_vocabulary(folder)

    return read


def _model_card(path: Path) -> None:
    writer = gguf.GGUFWriter(path=None, arch="gemma4")
    try:
        with unfit_values(path.parent):
            add_general(writer, path.parent, {})
            writer.write_header_to_file(path=path.with_name("header.gguf"))
            writer.write_kv_data_to_file()
    finally:
        writer.close()


READERS = (
    Reader(name="safetensors", make=from_file("model.safetensors", _safetensors), memory_factor=PARSED),
    Reader(name="safetensors-index", make=_index, structured=True, memory_factor=PARSED),
    Reader(name="hf-config", make=_config, structured=True, memory_factor=PARSED),
    Reader(
        name="tokenizer", make=from_file("tokenizer.json", lambda path: read_vocabulary(path.parent)), structured=True, memory_factor=PARSED
    ),
    Reader(name="tokenizer-config", make=_tokenizer_settings, structured=True, memory_factor=PARSED),
    Reader(name="model-card", make=from_file(CARD_NAME, _model_card), memory_factor=PARSED * 8),
    Reader(name="gguf-source", make=from_file("model.gguf", open_gguf), corpus="gguf"),
    Reader(name="imatrix", make=from_file("imatrix.gguf", read_imatrix), memory_factor=8.0),
)
