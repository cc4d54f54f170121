"""What is checked of a GGUF before llama.cpp sees it lets the files of every Gemma 4 member pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_export.pipeline.export import export_pair
from edge_export.pipeline.request import ExportRequest
from edge_runtime.bundle.gguf_gemma4 import DRAFTER, TARGET, check_model, rows_read
from tiny_members import MEMBERS, TARGETS


@pytest.mark.parametrize("name", [name for name in TARGETS if f"{name}-assistant" in MEMBERS])
def test_every_members_files_pass(name: str, member_folder: Callable[[str], Path], tmp_path: Path) -> None:
    target, drafter = str(member_folder(name)), str(member_folder(f"{name}-assistant"))
    request = ExportRequest(
        target=target, drafter=drafter, output=tmp_path / "bundle", target_quantization="f16", drafter_quantization="f16", verify=False
    )
    bundle = export_pair(request)
    header = check_model(bundle.path("target", "gguf"), TARGET)
    assert bundle.has("drafter_head") is MEMBERS[f"{name}-assistant"].ordered
    own, read = rows_read(check_model(bundle.path("drafter", "gguf"), DRAFTER), header)
    assert own == read
