"""generation_config.json, and the keys a GGUF has of it, become the manifest's generation defaults."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_export.checkpoint.checkpoint import open_checkpoint
from edge_export.checkpoint.sources import ResolvedSource, resolve_pair
from edge_export.errors import CheckpointError
from edge_export.gguf.writer import write_gguf
from edge_export.pipeline.bundle_files import generation_defaults
from edge_runtime.bundle.manifest import GenerationDefaults

Folders = Callable[[str], Path]
PUBLISHED = GenerationDefaults(temperature=1.0, top_k=64, top_p=0.95, end_tokens=(1, 6), suppress_tokens=(7, 8))


def source_of(folder: Path) -> ResolvedSource:
    return ResolvedSource(role="target", origin=str(folder), checkpoint=open_checkpoint(folder))


def test_the_published_form(member_folder: Folders, tmp_path: Path) -> None:
    folder = member_folder("12b")
    assert generation_defaults(source_of(folder)) == PUBLISHED
    path = tmp_path / "12b.gguf"
    write_gguf(open_checkpoint(folder), path, "bf16", lambda _: None)
    used = resolve_pair(str(path), str(member_folder("12b-assistant")))[0]
    # llama.cpp has its own set of end tokens.
    assert generation_defaults(used) == GenerationDefaults(temperature=1.0, top_k=64, top_p=pytest.approx(0.95), suppress_tokens=(7, 8))


@pytest.mark.parametrize(
    ("config", "result"),
    [
        (None, None),
        ({"eos_token_id": 1, "temperature": 0.7}, None),
        ({"do_sample": False, "top_k": 64}, GenerationDefaults(temperature=0.0)),
        ({"do_sample": True}, None),
        ({"suppress_tokens": None, "eos_token_id": [1, 6]}, GenerationDefaults(end_tokens=(1, 6))),
        ({"do_sample": True, "repetition_penalty": 1.5}, None),
    ],
)
def test_other_forms(config: dict[str, Any] | None, result: GenerationDefaults | None, copy: Folders) -> None:
    folder = copy("31b")
    if config is not None:
        (folder / "generation_config.json").write_text(json.dumps(config))
    assert generation_defaults(source_of(folder)) == result


@pytest.mark.parametrize(
    "config",
    [
        {"suppress_tokens": [512]},
        {"suppress_tokens": [-1]},
        {"eos_token_id": "1"},
        {"do_sample": True, "temperature": "hot"},
        {"do_sample": True, "temperature": 1, "top_p": 0},
        {"do_sample": True, "top_k": 1.5},
    ],
)
def test_values_that_cannot_be_are_named(config: dict[str, Any], copy: Folders) -> None:
    folder = copy("31b")
    (folder / "generation_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: \w+ is .*correct it"):
        generation_defaults(source_of(folder))
