"""Which chat template goes into a bundle, and which ones an export refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_export.errors import CheckpointError
from published_formats import edit_json

Folders = Callable[[str], Path]
FILE, CONFIG, OLD = "chat_template.jinja", "tokenizer_config.json", "chat_template.json"


@pytest.mark.parametrize(
    ("places", "taken"),
    [
        ({FILE: "a", CONFIG: "b", OLD: "c"}, "a"),
        ({CONFIG: "b", OLD: "c"}, "b"),
        ({CONFIG: [{"name": "default", "template": "b"}, {"name": "tool_use", "template": "d"}], FILE: "a"}, "a"),
        ({OLD: "c"}, "c"),
        ({}, None),
    ],
)
def test_the_template_that_transformers_takes_is_taken(places: dict[str, Any], taken: str | None, copy: Folders, export: Any) -> None:
    folder = copy("e2b")
    (folder / FILE).unlink()
    for name, template in places.items():
        if name == FILE:
            (folder / name).write_text(template)
        elif name == OLD:
            (folder / name).write_text(json.dumps({"chat_template": template}))
        else:
            edit_json(folder / name, lambda config, template=template: config.update(chat_template=template))
    bundle = export(target=str(folder))
    assert (bundle.path("chat_template").read_text() if bundle.has("chat_template") else None) == taken
    if set(places) & {FILE, CONFIG}:
        from transformers import AutoTokenizer

        assert AutoTokenizer.from_pretrained(folder).get_chat_template() == taken


BROKEN = {"{% for %}": "Expected an expression", "{{ x | no_such_filter }}": "no_such_filter", "{% unknown %}": "unknown tag"}


@pytest.mark.parametrize("template", BROKEN)
def test_a_template_that_does_not_compile_is_refused_before_anything_is_written(
    template: str, copy: Folders, export: Any, tmp_path: Path
) -> None:
    folder = copy("e2b")
    (folder / FILE).write_text(template)
    with pytest.raises(CheckpointError, match=rf"chat template that does not compile .*{BROKEN[template]}.*correct chat_template.jinja"):
        export(target=str(folder))
    assert [path.name for path in tmp_path.iterdir()] == ["e2b"]


def test_the_template_of_a_gguf_is_compiled_too(copy: Folders, export: Any, tmp_path: Path) -> None:
    path = Path(export().path("target"))
    damaged = tmp_path / "damaged.gguf"
    content = path.read_bytes()
    assert content.count(b"{% for ") == 1
    damaged.write_bytes(content.replace(b"{% for ", b"{% fur "))
    with pytest.raises(CheckpointError, match=r"does not compile .*give another GGUF"):
        export(target=str(damaged), target_quantization=None, output=tmp_path / "again")
