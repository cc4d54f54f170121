"""A hub name in place of a bundle: plan, question, export into the cache, once; against a hub on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

pytest.importorskip("huggingface_hub", reason="needs edge-mtp[export-onnx]")
pytest.importorskip("onnx", reason="needs edge-mtp[export-onnx]")

from edge_export.checkpoint.sources import reference_pair
from edge_runtime.cli import prompts
from edge_runtime.cli import run as cli
from fake_hub import FakeHub, serving

NAME = "google/gemma-4-E2B-it"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    target, drafter = reference_pair()
    with serving(FakeHub({NAME: {"main": target}, f"{NAME}-assistant": {"main": drafter}})) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        monkeypatch.setenv("EDGE_MTP_CACHE", str(tmp_path / "cache"))
        yield running


def generate(monkeypatch: pytest.MonkeyPatch, answer: str, *, terminal: bool = True):
    monkeypatch.setattr(prompts, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: terminal)))
    return CliRunner().invoke(cli.main, ["generate", NAME, "class Stack:", "-n", "8", "--json"], input=answer, prog_name="edge-run")


def test_a_hub_name_is_exported_once(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first = generate(monkeypatch, "y\n")
    assert first.exit_code == 0, first.output
    assert "Download google/gemma-4-E2B-it with its drafter and make a bundle of it in" in first.stderr
    assert "tok/s" in capfd.readouterr().out, "the plan"
    assert (tmp_path / "cache/bundles/google--gemma-4-E2B-it/manifest.json").is_file()
    asked = len(hub.ranges)
    second = generate(monkeypatch, "")
    assert json.loads(second.stdout)["text"] == json.loads(first.stdout)["text"]
    assert (len(hub.ranges), "Download" in second.stderr) == (asked, False)


def test_a_no_fetches_no_weights(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert generate(monkeypatch, "n\n").exit_code == 1
    assert {name for name, _ in hub.ranges} <= {"config.json"}
    assert not (tmp_path / "cache" / "bundles").exists()


def test_a_revision_is_no_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle of a quantization opened in place of that of a branch with its name."""
    monkeypatch.setenv("EDGE_MTP_CACHE", str(tmp_path))
    made = tmp_path / "bundles" / "owner--pair=Q8_0"
    made.mkdir(parents=True)
    (made / "manifest.json").touch()
    monkeypatch.setattr(prompts, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: False)))
    assert prompts.hub_bundle(Path("owner/pair:Q8_0")) == made
    for other in ("owner/pair@Q8_0", "owner/pair", "owner/pair@main:Q8_0"):
        assert prompts.hub_bundle(Path(other)) == Path(other)


def test_without_a_terminal_the_command_is_named(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    result = generate(monkeypatch, "", terminal=False)
    assert result.exit_code == 1
    assert f"make a bundle with: edge-export pair {NAME} --output gemma-4-E2B-it" in result.stderr
    assert hub.ranges == []
