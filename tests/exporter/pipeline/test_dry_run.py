"""Plans need no weights: built-in sizes, folders with config.json alone, hub names; on every device profile."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from click.testing import CliRunner

from edge_devices.errors import byte_text
from edge_devices.machine.detection import profiles
from edge_export.checkpoint.checkpoint import planned_checkpoint
from edge_export.checkpoint.sources import reference_pair
from edge_export.checkpoint.weight_formats import SIZES, published_config
from edge_export.cli.command import main
from edge_export.errors import CheckpointError, ExportError
from edge_export.pipeline.export import planned_export
from edge_runtime.planning.speed import manifest_plan
from edge_runtime.planning.speed_profile import speed_profile
from fake_hub import FakeHub, point_client_at, serving

Folders = Callable[[str], Path]
# Bytes of the published model.safetensors, without the header of up to some 100 kB.
ASSISTANTS = {"E2B": 157_565_344, "26B-A4B": 839_427_840, "31B": 939_042_560}


@pytest.mark.parametrize("size", SIZES.values())
def test_a_built_in_size_is_planned_on_every_profile(size: str) -> None:
    manifest = planned_export(size, size).manifest
    assert manifest.architecture.family == size
    for name in profiles():
        plan = manifest_plan(manifest, speed_profile(name, None), context=manifest.runtime.context, power=None)
        assert plan is not None


@pytest.mark.parametrize(("size", "published"), ASSISTANTS.items())
def test_built_in_assistants_have_the_published_bytes(size: str, published: int) -> None:
    config = published_config(size, assistant=True)
    assert config is not None
    tensors = planned_checkpoint(config, Path(size)).tensors.values()
    counted = sum(prod(tensor.shape) * (8 if tensor.name.endswith("token_ordering") else 2) for tensor in tensors)
    assert 0 < published - counted < 100_000


@pytest.mark.parametrize("place", ["target", "text"])
def test_what_a_gguf_is_refused_for_has_no_plan(place: str, member_folder: Folders, tmp_path: Path) -> None:
    config = json.loads((member_folder("e2b") / "config.json").read_text())
    (config if place == "target" else config["text_config"])["quantization_config"] = {"quant_method": "gemma"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match=r"rounds its activations, which GGUF files cannot, .*export this one with --format onnx"):
        planned_export(str(tmp_path), "E2B")


def test_a_folder_with_config_json_alone_is_planned_like_the_whole(member_folder: Folders, tmp_path: Path) -> None:
    pair = [member_folder("e2b"), member_folder("e2b-assistant")]
    bare = [tmp_path / folder.name for folder in pair]
    for whole, folder in zip(pair, bare, strict=True):
        folder.mkdir()
        shutil.copy(whole / "config.json", folder)
    plans = [planned_export(*map(str, folders)).manifest for folders in (bare, pair)]
    assert plans[0].cache_layout == plans[1].cache_layout
    # The checkpoint stores K and V of layers that share them too.
    assert [file.bytes for file in plans[0].files] == [pytest.approx(file.bytes, rel=0.02) for file in plans[1].files]


def test_a_hub_name_fetches_its_config_alone(member_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = {name: member_folder(name) for name in ("e2b", "e2b-assistant")}
    hub = FakeHub({f"google/{name}": dict.fromkeys(("main", "v1", "v2"), folder) for name, folder in members.items()})
    with serving(hub):
        point_client_at(hub, tmp_path / "cache", monkeypatch)
        result = CliRunner().invoke(main, ["plan", "google/e2b", "google/e2b-assistant@v1", "--revision", "v2", "--json"])
        assert result.exit_code == 0, result.stderr
        made = json.loads(result.stdout)
        assert made["plan"]["memory"]["weights"] > 0
        weights = sum(path.stat().st_size for folder in members.values() for path in folder.glob("*.safetensors"))
        assert made["export"]["download_bytes"] == pytest.approx(weights, rel=0.05)
        assert made["export"]["download_from"] == "listing"
        assert [name for name, _ in hub.ranges] == ["config.json", "config.json"]
        with pytest.raises(CheckpointError, match="is a GGUF file; plan for its size instead"):
            planned_export("unsloth/x:x.gguf", "google/e2b-assistant")
    # Where the hub cannot be asked, the download is estimated.
    point_client_at(FakeHub({}, port=9), tmp_path / "cache", monkeypatch)
    planned = planned_export("google/e2b@v2", str(members["e2b-assistant"]))
    assert not planned.listed
    assert planned.download_bytes == pytest.approx(2 * planned.manifest.architecture.parameters, rel=0.05)


@pytest.mark.parametrize("size", SIZES.values())
def test_a_plan_says_the_download_and_the_disk(size: str) -> None:
    result = CliRunner().invoke(main, ["plan", size, "--profile", "raspberry-pi-5"])
    assert result.exit_code == 0, result.stderr
    download, disk, device = result.stdout.splitlines()[:3]
    assert device.startswith("Raspberry Pi 5")
    planned = planned_export(size, size)
    weights = planned.manifest.architecture.parameters + planned.manifest.architecture.drafter_parameters
    assert planned.download_bytes == pytest.approx(2 * weights, rel=0.001), "16 bits each, and the order of tokens"
    assert planned.disk_bytes == pytest.approx(2 * weights + sum(file.bytes for file in planned.manifest.files), rel=0.001)
    label = "estimated from the config: the text model in 16 bits, without images and sound"
    assert download == f"To download: {byte_text(planned.download_bytes)} ({label})."
    assert disk.startswith(f"Free disk for the export: about {byte_text(planned.disk_bytes)}, ")


@pytest.mark.parametrize("kinds", [("q4_k_m", "q8_0"), ("f16", "bf16"), ("q6_k", "f16")])
def test_what_is_here_is_not_downloaded_and_takes_what_an_export_asks_for(kinds: tuple[str, str], export: Any, disk_with: Any) -> None:
    target, drafter = map(str, reference_pair())
    quantizations = dict(zip(("target_quantization", "drafter_quantization"), kinds, strict=True))
    planned = planned_export(target, drafter, **quantizations)
    assert (planned.download_bytes, planned.lines()[0]) == (0, "To download: nothing, its files are here.")
    with disk_with(1234), pytest.raises(ExportError, match="needs about") as refused:
        export(target=target, drafter=drafter, **quantizations)
    asked = float(re.search(r"needs about ([\d.]+) MB", str(refused.value))[1]) * 1e6  # type: ignore[index]
    assert planned.disk_bytes == pytest.approx(asked, rel=0.1), "all but vocabularies and texts"
