"""A few of the faults of scripts/checks/faults.py, whose long campaigns are in docs/security.md."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("the limits and signals are Linux's", allow_module_level=True)
pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
pytest.importorskip("gguf", reason="needs edge-mtp[export]")


from edge_export.checkpoint.sources import reference_pair
from edge_export.cli.command import main
from edge_export.errors import ExportError
from edge_export.pipeline import export
from edge_export.pipeline.export import export_pair
from edge_export.pipeline.request import ExportRequest
from faults import KINDS, arguments, one_fault


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The old bundle, and how many seconds an export takes."""
    output = tmp_path_factory.mktemp("old") / "bundle"
    main(arguments(output), standalone_mode=False)
    begin = time.monotonic()
    main(arguments(output), standalone_mode=False)
    return output, time.monotonic() - begin


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_that_fails_leaves_the_old_bundle_or_the_new_one(kind: str, exported: tuple[Path, float], tmp_path: Path) -> None:
    ended = kind in ("kill", "interrupt")
    output, chance = Path(shutil.copytree(exported[0], tmp_path / "place" / "bundle")), random.Random(f"{kind}:3")
    left = {one_fault(kind, output, chance, exported[1]).left for _ in range(2 if ended else 3)}
    if ended:
        assert left <= {"old", "new", "none"}
    else:
        assert "old" in left, "at least one limit was hit"


@pytest.mark.parametrize("megabytes", [2, 9, 14])
def test_a_disk_that_is_full_sooner_than_it_seemed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, megabytes: int) -> None:
    """A real file system that takes no more; the check before the export is told otherwise, as when others fill the disk meanwhile."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        monkeypatch.setattr(export, "_check_space", lambda *_: None)
        pair = reference_pair()
        request = ExportRequest(target=str(pair[0]), drafter=str(pair[1]), output=place / "bundle", verify=False)
        with pytest.raises(ExportError, match=r"No space left on device|could not quantize"):
            export_pair(request)
        assert list(place.iterdir()) == []
    finally:
        subprocess.run(["umount", str(place)], check=True)
