"""config.yaml in a bundle, and the configuration files and presets that an export reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="needs edge-mtp[export]")
from click.testing import CliRunner, Result

from edge_export.cli.command import main
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.config.settings import CONFIG_NAME, load_settings, read_config

Folders = Callable[[str], Path]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in ("pair", *arguments, "--no-verify")])


def test_a_bundle_says_how_it_is_run(pair: list[Path], tmp_path: Path) -> None:
    result = invoke(*pair, "-o", tmp_path / "out", "--context", 100, "--preset", "edge")
    assert result.exit_code == 0, result.stderr
    bundle = open_bundle(tmp_path / "out")
    config = read_config(tmp_path / "out" / CONFIG_NAME)
    assert (config.verifier.model, config.drafter.model) == tuple(path.name for path in pair), "no folder of its maker"
    assert (config.verifier.precision, config.drafter.precision) == ("q4_k_m", "q8_0")
    assert (config.tuning.min_horizon, config.tuning.max_horizon, config.tuning.preset) == (2, 4, None)
    settings = load_settings(bundle)
    assert (settings.context, settings.policy, settings.draft_length, settings.longest_draft) == (100, "rolling", 3, 12)
    assert CONFIG_NAME not in {entry.path for entry in bundle.manifest.files}, "it may be edited, so it is not hashed"
    (tmp_path / "out" / CONFIG_NAME).unlink()
    assert load_settings(open_bundle(tmp_path / "out")).policy == "profit"


def test_a_file_names_models_precisions_and_context(pair: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    block = {
        "verifier": {"model": str(pair[0]), "precision": "f16"},
        "drafter": {"model": str(pair[1]), "precision": "bf16"},
        "cache": {"max_context_length": 120},
        "tuning": {"draft_length": 5},
    }
    file.write_text(json.dumps({"speculative_decoding": block}))
    result = invoke("-o", tmp_path / "out", "--config", file, "--drafter-quant", "f16", "--preset", "chat")
    assert result.exit_code == 0, result.stderr
    bundle = open_bundle(tmp_path / "out")
    assert [bundle.file(role).quantization for role in ("target", "drafter")] == ["f16", "f16"]
    config = read_config(tmp_path / "out" / CONFIG_NAME)
    assert config.drafter.precision == "f16", "what came out, not what the file asked for"
    assert (config.cache.max_context_length, config.tuning.draft_length, config.tuning.max_horizon) == (120, 5, 8)


def test_what_cannot_be_is_refused_and_nothing_is_left(pair: list[Path], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("speculative_decoding: {verifier: {precision: int4}}")
    result = invoke(*pair, "-o", tmp_path / "out", "--config", tmp_path / "mine.yaml")
    assert (result.exit_code, "'int4' is unknown; choose one of q4_0" in result.stderr) == (1, True), result.stderr
    assert not (tmp_path / "out").exists()


def test_a_sparse_head_must_be_there_to_be_asked_for(member_folder: Folders, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("speculative_decoding: {drafter: {sparse_output: true}}")
    result = invoke(member_folder("12b"), member_folder("12b-assistant"), "-o", tmp_path / "out", "--config", tmp_path / "mine.yaml")
    assert result.exit_code == 1
    assert "gives no split drafter" in result.stderr
