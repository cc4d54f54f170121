"""Reads the tokenizer files of a checkpoint; gguf/test_equals_reference.py compares the pieces with llama.cpp's converter."""

from __future__ import annotations

import json
from pathlib import Path

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
            template_file = tmp_path / name
            template_file.write_text(json.dumps({**json.loads(template_file.read_text()), "chat_template": template}))
        else:
            (tmp_path / name).write_text(template)
        if used:
            assert read_vocabulary(tmp_path).chat_template == template
        else:
            with pytest.raises(CheckpointError, match="chat template"):
                read_vocabulary(tmp_path)
