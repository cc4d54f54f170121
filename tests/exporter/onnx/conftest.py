"""Exports of tiny members, which tests of dynamic and of fixed shapes make alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny_members import settled


@pytest.fixture
def exported(member_folder: Callable[[str], Path], few_drafts: None, tmp_path: Path) -> Callable[..., Any]:
    """Returns a function from a member and its weights to its ONNX bundle; the graphs have fixed shapes with a `device`."""
    pytest.importorskip("onnx", reason="needs edge-mtp[export]")
    from edge_export.onnx.request import OnnxRequest
    from edge_export.pipeline.export import export_pair
    from edge_export.pipeline.request import ExportRequest
    from edge_runtime.bundle.onnx_graph import check_onnx

    def made(member: str = "e2b", weights: Any = "f32", device: Any = None, progress: Any = None, **changes: Any) -> Any:
        values: dict[str, Any] = {
            "target": str(settled(member_folder, member)),
            "drafter": str(settled(member_folder, f"{member}-assistant")),
            "output": tmp_path / "out",
            "gguf": False,
            "onnx": OnnxRequest(target=weights, drafter=weights, device=device),
            "threads": 1,
            "context": 512,
        }
        bundle = export_pair(ExportRequest(**values | changes), progress)
        for graph in bundle.folder.glob("*.onnx"):
            check_onnx(graph)  # whatever the form, the runtime opens it
        return bundle

    return made
