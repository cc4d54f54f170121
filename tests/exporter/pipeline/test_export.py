"""An export is complete or absent: the bundle opens, and a failing step leaves the folder unchanged."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_export import output
from edge_export.checkpoint.checkpoint import read_gguf_header
from edge_export.checkpoint.sources import reference_pair
from edge_export.errors import ExportError
from edge_export.onnx.request import OnnxRequest
from edge_runtime.bundle.bundle import Bundle, open_bundle
from edge_runtime.bundle.manifest import MANIFEST_NAME
from polling import dead_process
from progress_log import Failing, ProgressLog

Export = Callable[..., Bundle]
NO_GGUF = {"target_quantization": None, "drafter_quantization": None}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


def test_the_bundle_opens_and_says_where_it_came_from(export: Export, tmp_path: Path) -> None:
    log = ProgressLog()
    made = export(log, target_quantization=None, drafter_quantization=None, context=700)
    bundle = open_bundle(tmp_path / "out")
    assert bundle.manifest == made.manifest
    name = Path(bundle.manifest.sources["target"].origin).name
    assert [(f.role, f.path, f.quantization) for f in bundle.manifest.files] == [
        ("target", f"{name}-Q4_K_M.gguf", "q4_k_m"),
        ("drafter", f"mtp-{name}-Q8_0.gguf", "q8_0"),
        ("drafter_head", f"mtp-{name}-Q8_0.gguf_head", "q8_0"),
        ("tokenizer", "tokenizer.json", None),
        ("chat_template", "chat_template.jinja", None),
    ]
    target, *_, template = bundle.manifest.files
    assert 4.5 < target.bits_per_weight < 8.5, "of tensors alone: the vocabulary is most of such a small file"
    assert target.weights == f"q4_k_m, {target.bits_per_weight:.2g} bits per weight"
    assert (template.bits_per_weight, template.weights) == (None, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    others = {path.name for path in (tmp_path / "out").iterdir()} - {f.path for f in bundle.manifest.files}
    assert others == {MANIFEST_NAME, "config.yaml", "models.ini", "Modelfile", "README.md"}, "nothing unquantized"
    assert bundle.manifest.runtime.context == bundle.manifest.cache_layout.full.capacity == 700
    assert bundle.manifest.created_by.startswith("edge-mtp ")
    weights = [f.name for f in bundle.manifest.sources["target"].files if f.name.endswith(".safetensors")]
    assert len(weights) > 1, "every shard is named"
    assert any("vision_tower" in name for name in bundle.manifest.left_out)
    assert not any("masked_embedding" in name for name in bundle.manifest.left_out), "the drafter's head carries it"
    assert '"media"' not in (tmp_path / "out" / MANIFEST_NAME).read_text()
    assert any("vision_tower" in sentence for sentence in log.messages)
    assert bundle.manifest.parity == {"skipped": "it was switched off with --no-verify"}
    assert read_gguf_header(bundle.path("target")).keys["general.file_type"] == 15


def test_progress_ends_near_its_totals(export: Export) -> None:
    log = ProgressLog()
    export(log)
    counted = [(title, total, done) for (title, total), done in zip(log.steps, log.done, strict=True) if total is not None]
    assert len(counted) == 5
    for title, total, done in counted:
        assert done == pytest.approx(total, rel=0.1), title


def test_a_gguf_is_taken_as_it_is(export: Export, tmp_path: Path) -> None:
    first = export()
    paths = [str(first.path(role)) for role in ("target", "drafter")]
    unchanged = {"target_quantization": None, "drafter_quantization": None}
    second = export(target=paths[0], drafter=paths[1], output=tmp_path / "again", verify=True, **unchanged)
    for role in ("target", "drafter"):
        assert second.file(role).sha256 == first.file(role).sha256
        assert second.file(role).quantization == first.file(role).quantization
    assert not second.has("drafter_head"), "a GGUF has no head to take"
    assert second.manifest.cache_layout == first.manifest.cache_layout
    assert second.manifest.architecture.parameters == first.manifest.architecture.parameters
    assert second.path("chat_template").read_bytes() == first.path("chat_template").read_bytes()
    assert second.manifest.parity == {"skipped": "the target and drafter came as GGUF, without a checkpoint to compare with"}
    open_bundle(tmp_path / "again")
    with pytest.raises(ExportError, match="taken as it is"):
        export(target=paths[0], target_quantization="q8_0", output=tmp_path / "third")


def test_a_failing_step_leaves_nothing(export: Export, tmp_path: Path) -> None:
    export(log := ProgressLog(), target_quantization="q8_0")
    shutil.rmtree(tmp_path / "out")
    assert len(log.steps) > 8
    for number in range(1, len(log.steps) + 1):
        with pytest.raises(ExportError, match="failed on purpose"):
            export(Failing(number, ExportError("failed on purpose")), target_quantization="q8_0")
        assert snapshot(tmp_path) == {}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device", "file")])
def test_the_old_bundle_survives_a_failed_replacement(error: BaseException, export: Export, tmp_path: Path) -> None:
    export(log := ProgressLog(), target_quantization="q8_0")
    before = snapshot(tmp_path)
    with pytest.raises((KeyboardInterrupt, ExportError), match="No space left" if isinstance(error, OSError) else None):
        export(Failing(len(log.steps), error), force=True, context=64, target_quantization="q8_0")
    assert snapshot(tmp_path) == before


def test_force_replaces_a_bundle_and_nothing_else(export: Export, tmp_path: Path) -> None:
    export()
    with pytest.raises(ExportError, match=r"exists already; .*--force"):
        export(context=64)
    export(force=True, context=64)
    assert open_bundle(tmp_path / "out").manifest.runtime.context == 64
    (tmp_path / "out" / MANIFEST_NAME).unlink()
    before = snapshot(tmp_path)
    with pytest.raises(ExportError, match="is not a bundle"):
        export(force=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "manifest",
    [
        "{}",
        "[",
        '{"manifest_version": 3, "files": []}',
        '{"schema_version": 1, "created_by": "us", "files": []}',
        '{"schema_version": 1, "created_by": "edge-mtp 1", "files": ["a"]}',
    ],
)
def test_force_takes_no_manifest_of_others_for_a_bundle(manifest: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_text(manifest)
    with pytest.raises(ExportError, match="is not a bundle"):
        output.check_output(tmp_path, force=True)


@pytest.mark.parametrize("name", ["notes.txt", "sub/target-F16.gguf", "link"])
def test_force_replaces_no_bundle_with_files_of_others(name: str, export: Export, tmp_path: Path) -> None:
    export()
    foreign = tmp_path / "out" / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.symlink_to(tmp_path) if name == "link" else foreign.write_text("mine")
    with pytest.raises(ExportError, match=f"{name} is no file of the bundle"):
        export(force=True)
    assert os.path.lexists(foreign)


def test_a_bundle_is_not_replaced_by_what_is_made_of_it(export: Export, tmp_path: Path) -> None:
    made = export()
    before = snapshot(tmp_path)
    changes = {"target": str(made.path("target")), "target_quantization": None}
    with pytest.raises(ExportError, match=r"-F16\.gguf lies in .*out, which --force would replace"):
        export(force=True, **changes)
    assert snapshot(tmp_path) == before


def test_a_bundle_that_appears_meanwhile_is_not_replaced(export: Export, tmp_path: Path) -> None:
    class Appearing(ProgressLog):
        def step(self, title: str, total_bytes: int | None) -> None:
            super().step(title, total_bytes)
            if title == "Hash the bundle":
                (tmp_path / "out").mkdir()

    with pytest.raises(ExportError, match="exists already"):
        export(Appearing())
    assert snapshot(tmp_path) == {"out": b""}


def test_leftovers_of_killed_exports_go_and_those_of_running_ones_stay(export: Export, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        for process in (dead_process(), running.pid):
            (tmp_path / f".out.partial-{process}").mkdir()
        (tmp_path / ".other.partial-1").mkdir()
        export()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f".out.partial-{running.pid}", ".other.partial-1", "out"])


def test_a_bundle_whose_replacement_was_killed_midway_is_put_back(export: Export, tmp_path: Path) -> None:
    export()
    before = snapshot(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / f".out.replaced-{dead_process()}")
    with pytest.raises(ExportError, match="exists already"):
        output.check_output(tmp_path / "out", force=False)
    assert snapshot(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_no_space_is_refused_with_both_numbers(export: Export, disk_with: Any, tmp_path: Path) -> None:
    with disk_with(1234), pytest.raises(ExportError, match=rf"{tmp_path} has 1.2 kB free, the export needs about [\d.]+ MB .*another disk"):
        export()
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize("changes", [{}, {"onnx": OnnxRequest()}, {"gguf": False, "onnx": OnnxRequest()}])
def test_the_export_asks_for_as_much_disk_as_it_takes(changes: dict[str, Any], export: Export, disk_with: Any, tmp_path: Path) -> None:
    changes |= NO_GGUF | dict(zip(("target", "drafter"), map(str, reference_pair()), strict=True))
    with disk_with(1234), pytest.raises(ExportError, match="needs about") as refused:
        export(**changes)
    number, unit = re.search(r"needs about ([\d.]+) (kB|MB)", str(refused.value)).groups()  # type: ignore[union-attr]
    asked, peak = float(number) * {"kB": 1e3, "MB": 1e6}[unit], 0

    class Watching(ProgressLog):
        def step(self, title: str, total_bytes: int | None) -> None:
            nonlocal peak
            peak = max(peak, sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()))
            super().step(title, total_bytes)

    export(Watching(), **changes)
    assert 0.95 * peak < asked < 1.1 * peak
