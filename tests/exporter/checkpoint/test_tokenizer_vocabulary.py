"""Reads the tokenizer files of a checkpoint; gguf/test_equals_reference.py compares the pieces with llama.cpp's converter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge_export.checkpoint.tokenizer_vocabulary import MAX_TEMPLATE_BYTES, read_vocabulary
from edge_export.errors import CheckpointError
from edge_runtime.text import chat_template
from tiny_members import write_tokenizer


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_that_the_runtime_would_not_read_is_refused(name: str, tmp_path: Path) -> None:
    assert MAX_TEMPLATE_BYTES == chat_template.MAX_TEMPLATE_BYTES
    write_tokenizer(tmp_path)
    for length, used in ((MAX_TEMPLATE_BYTES, True), (MAX_TEMPLATE_BYTES + 1, False)):
        template = "é" + "x" * (length - 2)
        if name.endswith("json"):
            (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
            template_file = tmp_path / name
            template_file.write_text(json.dumps({**json.loads(template_file.read_text()), "chat_template": template}))
        else:
            (tmp_path / name).write_text(template)
        if used:
            assert read_vocabulary(tmp_path).chat_template == template
        else:
            with pytest.raises(CheckpointError, match="chat template"):
                read_vocabulary(tmp_path)


@pytest.mark.parametrize(
    ("settings", "special_map", "config", "bos", "eos"),
    [
        ({"bos_token": "<bos>", "eos_token": "<eos>"}, None, {}, 2, 1),
        ({"bos_token": {"content": "<bos>"}, "eos_token": "<turn|>"}, None, {"eos_token_id": 1}, 2, 6),
        ({}, None, {"bos_token_id": 2, "eos_token_id": 6}, 2, 6),
        ({}, None, {"eos_token_id": [6, 1], "text_config": {"bos_token_id": 2}}, 2, 1),
        ({"bos_token": None, "eos_token": None}, None, {}, 2, 1),
        ({}, None, {"bos_token_id": None, "eos_token_id": None}, 2, 1),
        ({"eos_token": "<eos>"}, {"eos_token": "<turn|>"}, {}, 2, 6),
        ({"eos_token": "<eos>", "added_tokens_decoder": {}}, {"eos_token": "<turn|>"}, {}, 2, 1),
        ({"eos_token": "no piece"}, None, {"eos_token_id": 6}, 2, 6),
    ],
)
def test_where_the_first_and_the_last_token_are_named(
    settings: dict[str, Any], special_map: dict[str, Any] | None, config: dict[str, Any], bos: int, eos: int, tmp_path: Path
) -> None:
    """By the tokenizer's files, then config.json's numbers, then Gemma's own: a model without its first token answers badly."""
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GemmaTokenizer", **settings}))
    (tmp_path / "config.json").write_text(json.dumps(config))
    if special_map is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(special_map))
    special = read_vocabulary(tmp_path).special_ids
    assert (special["bos"], special["eos"]) == (bos, eos)
