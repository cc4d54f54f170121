"""A path that is no bundle is answered with the command that makes it one."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_runtime import BundleError, open_bundle


@pytest.mark.parametrize(
    ("files", "value", "answer"),
    [
        (["a.gguf"], "a.gguf", r"it is a GGUF file; make a bundle of it and its drafter with: edge-export .*a\.gguf DRAFTER --output my-b"),
        (["a.txt"], "a.txt", "it is a file; give a bundle's folder"),
        (["x/mtp-drafter.gguf", "x/target.gguf"], "x", r"edge-export pair \S*x/target.gguf \S*x/mtp-drafter.gguf --output my-bundle"),
        (["x/config.json", "x/model.safetensors"], "x", "it holds a checkpoint; make a bundle of it and its drafter with: edge-export"),
        (["my-bundle/manifest.json"], "my-bunlde", "there is no such folder; did you mean .*my-bundle"),
        (["out/my-bundle/manifest.json"], "out", "it has no manifest.json, but .*out/my-bundle is one"),
        (["x/notes.txt"], "x", "it has no manifest.json; make one with edge-export"),
        ([], "nowhere", "there is no such folder; make a bundle with edge-export"),
    ],
)
def test_what_is_no_bundle_is_recognised(tmp_path: Path, files: list[str], value: str, answer: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(BundleError, match=f"is not a bundle: .*{answer}"):
        open_bundle(tmp_path / value)


@pytest.mark.parametrize(
    ("name", "drafter", "output"),
    [
        ("google/gemma-4-E2B-it", "", "gemma-4-E2B-it"),
        ("google/gemma-4-E2B-it@main", "", "gemma-4-E2B-it"),
        ("someone/gemma-4-E2B-it", " someone/gemma-4-E2B-it-assistant", "gemma-4-E2B-it"),
        ("unsloth/x-GGUF", "", "x-GGUF"),
        ("ggml-org/x:x-Q4_0.gguf", "", "x"),
        ("ggml-org/x:Q4_0", "", "x"),
    ],
)
def test_a_hub_name_is_answered_with_its_export(
    name: str, drafter: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BundleError, match=f"edge-export pair {name}{drafter} --output {output}$"):
        open_bundle(name)
