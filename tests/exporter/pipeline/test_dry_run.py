"""Plans need no weights: built-in sizes, folders with config.json alone, hub names; on every device profile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from click.testing import CliRunner

from edge_devices.machine.profiles import profiles
from edge_export.checkpoint.checkpoint import planned_checkpoint
from edge_export.checkpoint.published import hub
from edge_export.checkpoint.published.formats import SIZES, published_config
from edge_export.cli.command import main
from edge_export.errors import CheckpointError, ExportError
from edge_export.pipeline.dry_run import planned_manifest
from edge_runtime.planning.device_speed import device_speed
from edge_runtime.planning.speed import manifest_plan

Folders = Callable[[str], Path]
# Bytes of the published model.safetensors, without the header of up to some 100 kB.
ASSISTANTS = {"E2B": 157_565_344, "26B-A4B": 839_427_840, "31B": 939_042_560}


@pytest.mark.parametrize("size", SIZES.values())
def test_a_built_in_size_is_planned_on_every_profile(size: str) -> None:
    manifest = planned_manifest(size, size)
    assert manifest.architecture.family == size
    for name in profiles():
        plan = manifest_plan(manifest, device_speed(name, None), context=manifest.runtime.context, power=None)
        assert plan is not None


@pytest.mark.parametrize(("size", "published"), ASSISTANTS.items())
def test_built_in_assistants_have_the_published_bytes(size: str, published: int) -> None:
    config = published_config(size, assistant=True)
    assert config is not None
    tensors = planned_checkpoint(config, Path(size)).tensors.values()
    counted = sum(prod(tensor.shape) * (8 if tensor.name.endswith("token_ordering") else 2) for tensor in tensors)
    assert 0 < published - counted < 100_000


def test_other_sizes_are_unknown() -> None:
    assert published_config("3B", assistant=False) is None
    with pytest.raises(CheckpointError, match="the target 3B does not exist"):
        planned_manifest("3B", "3B")


@pytest.mark.parametrize("place", ["target", "text"])
def test_what_a_gguf_is_refused_for_has_no_plan(place: str, member_folder: Folders, tmp_path: Path) -> None:
    config = json.loads((member_folder("e2b") / "config.json").read_text())
    (config if place == "target" else config["text_config"])["quantization_config"] = {"quant_method": "gemma"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match=r"rounds its activations, which GGUF files cannot, .*export this one with --format onnx"):
        planned_manifest(str(tmp_path), "E2B")


def test_a_folder_with_config_json_alone_is_planned_like_the_whole(member_folder: Folders, tmp_path: Path) -> None:
    pair = [member_folder("e2b"), member_folder("e2b-assistant")]
    bare = [tmp_path / folder.name for folder in pair]
    for whole, folder in zip(pair, bare, strict=True):
        folder.mkdir()
        shutil.copy(whole / "config.json", folder)
    plans = [planned_manifest(*map(str, folders)) for folders in (bare, pair)]
    assert plans[0].cache_layout == plans[1].cache_layout
    # The checkpoint stores K and V of layers that share them too.
    assert [file.bytes for file in plans[0].files] == [pytest.approx(file.bytes, rel=0.02) for file in plans[1].files]


def test_a_hub_name_fetches_its_config_alone(member_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: hub.HubName, patterns: list[str], *_: object) -> Path:
        asked.append((str(name), patterns))
        folder = tmp_path / str(len(asked))
        folder.mkdir()
        shutil.copy(member_folder(name.repository.rpartition("/")[2]) / "config.json", folder)
        return folder

    monkeypatch.setattr(hub, "_download", download)
    result = CliRunner().invoke(main, ["plan", "google/e2b", "google/e2b-assistant@v1", "--revision", "v2", "--json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["plan"]["memory"]["weights"] > 0
    assert asked == [("google/e2b@v2", ["config.json"]), ("google/e2b-assistant@v1", ["config.json"])]
    with pytest.raises(CheckpointError, match="is a GGUF file; plan for its size instead"):
        planned_manifest("unsloth/x:x.gguf", "google/e2b-assistant")


def test_one_name_is_enough_for_a_plan_of_a_size() -> None:
    result = CliRunner().invoke(main, ["plan", "E2B", "--profile", "raspberry-pi-5", "--json"])
    assert result.exit_code == 0, result.stderr
    assert CliRunner().invoke(main, ["pair", "E2B", "-o", "out"]).exit_code == 2
