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
from published_formats import edit_json

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
        (None, {}),
        ({"temperature": 0.7}, {}),
        ({"do_sample": None, "top_p": 0.7}, {}),
        ({"do_sample": False, "top_k": 64}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "top_p": 0.5}, {"temperature": 1.0, "top_p": 0.5}),
        ({"do_sample": True, "min_p": 0.1, "temperature": 0.3}, {"temperature": 0.3, "min_p": 0.1}),
        ({"suppress_tokens": None}, {}),
        ({"eos_token_id": [6, 6]}, {"end_tokens": (6,)}),
        ({"do_sample": False, "repetition_penalty": 1.5}, {"temperature": 0.0, "repetition_penalty": 1.5}),
    ],
)
def test_other_forms(config: dict[str, Any] | None, result: dict[str, Any], copy: Folders) -> None:
    folder = copy("31b")
    edit_json(folder / "config.json", lambda config: (config.pop("eos_token_id", None), inner(config).pop("eos_token_id", None)))
    if config is not None:
        (folder / "generation_config.json").write_text(json.dumps(config))
    assert generation_defaults(source_of(folder)) == (GenerationDefaults(**result) if result else None)


def inner(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config", config)


@pytest.mark.parametrize(
    ("generation", "outer", "text", "ends"),
    [
        (6, 1, 5, (6,)),
        ([6], [1, 5], None, (6,)),
        ("missing", [1, 6], 5, (1, 6)),
        ("missing", 6, None, (6,)),
        (None, 6, 1, (6,)),
        ("no file", [5, 6], 1, (5, 6)),
        ("no file", None, 6, (6,)),
        ("no file", None, [6, 1], (6, 1)),
    ],
)
def test_which_end_tokens_count(generation: Any, outer: Any, text: Any, ends: tuple[int, ...], copy: Folders) -> None:
    folder = copy("31b")
    edit_json(folder / "config.json", lambda config: (inner(config).update(eos_token_id=text), config.update(eos_token_id=outer)))
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    if generation != "no file":
        path.write_text(json.dumps({} if generation == "missing" else {"eos_token_id": generation}))
    made = generation_defaults(source_of(folder))
    assert made is not None
    assert made.end_tokens == ends


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
