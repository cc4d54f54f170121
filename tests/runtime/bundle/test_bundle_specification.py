"""docs/design/manifest.md against the reader: every field with type and default, the example, and the roles written."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from pathlib import Path

import pytest

from edge_devices.files.typed_json import from_json
from edge_runtime.bundle.manifest import FROM_ZERO, SCHEMA_VERSION, Manifest, has_own_hash, with_hash

PAGE = Path(__file__).parents[3] / "docs" / "design" / "manifest.md"
TEXT = PAGE.read_text(encoding="utf-8")
NAMES = {int: "integer", float: "number", str: "text", bool: "boolean", type(None): "null"}


def structures(cls: type) -> dict[str, type]:
    """The dataclasses that a manifest is made of, by name."""
    result = {cls.__name__: cls}
    for hint in typing.get_type_hints(cls).values():
        for part in (hint, *typing.get_args(hint), *(a for b in typing.get_args(hint) for a in typing.get_args(b))):
            if dataclasses.is_dataclass(part):
                result |= structures(part)
    return result


def written(hint: object) -> str:
    """How the page names a type."""
    if hint in NAMES:
        return NAMES[hint]
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return " or ".join(written(part) for part in arguments)
    if typing.get_origin(hint) is tuple:
        return f"list of {written(arguments[0])}"
    if typing.get_origin(hint) is dict:
        return "object" if arguments[1] is typing.Any else f"object of {written(arguments[1])}"
    return hint.__name__


def table(name: str) -> dict[str, tuple[str, str]]:
    """Key to type and default, of the table below a heading."""
    section = re.search(rf"^## {name}\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert section, f"docs/design/manifest.md has no section {name}"
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|([^|]*)\|", section[1], re.MULTILINE)
    return {key: (kind.strip(), default.strip()) for key, kind, default in rows}


STRUCTURES = structures(Manifest)


def test_all_structures_are_found():
    assert set(STRUCTURES) >= {"Manifest", "Rotation", "CacheBuffer", "SourceFile", "ImportanceSource", "StaticGraphs"}


@pytest.mark.parametrize("name", sorted(STRUCTURES))
def test_every_field_is_specified(name):
    cls = STRUCTURES[name]
    hints = typing.get_type_hints(cls)
    assert {key: kind for key, (kind, _) in table(name).items()} == {f.name: written(hints[f.name]) for f in dataclasses.fields(cls)}


@pytest.mark.parametrize("name", sorted(STRUCTURES))
def test_defaults_are_specified(name):
    for field in dataclasses.fields(STRUCTURES[name]):
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        stated = table(name)[field.name][1]
        if default is dataclasses.MISSING:
            assert stated == "", field.name
        elif dataclasses.is_dataclass(default):
            assert stated == "its defaults", field.name
        elif isinstance(default, str):
            assert stated == f"`{default}`", field.name
        else:
            assert json.loads(stated.strip("`")) == (list(default) if isinstance(default, tuple) else default), field.name


def test_the_example_is_a_manifest():
    text = re.search(r"```json\n(\{.*?\n\})\n```", TEXT, re.DOTALL)[1] + "\n"
    assert has_own_hash(text.encode())
    example = json.loads(text)
    manifest = from_json(Manifest, example, "manifest")
    assert manifest.schema_version == SCHEMA_VERSION
    assert manifest.to_json() == with_hash(example)


def test_what_may_be_zero_is_specified():
    bullet = re.search(r"^- Integers are .*?(?=^- )", TEXT, re.DOTALL | re.MULTILINE)[0]
    assert set(re.findall(r"`(\w+)`", bullet)) == FROM_ZERO


def test_roles_of_the_shipped_pair_are_specified(exported_pair, onnx_pair):
    named = set(re.findall(r"`(\w+)`", TEXT[: TEXT.index("## Example of a manifest")]))
    for folder in (exported_pair, onnx_pair("int8")):
        files = json.loads((folder / "manifest.json").read_text())["files"]
        assert {file["role"] for file in files} <= named
        formats = table("BundleFile")
        assert formats
        assert {file["format"] for file in files} <= {"gguf", "onnx", "onnx_data", "npy", "json", "jinja"}
