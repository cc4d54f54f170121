"""What a runtime refuses is refused before anything is written, and what it runs is exported; with and without parity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx", reason="needs edge-mtp[export]")
pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
pytest.importorskip("transformers", reason="needs edge-mtp[verify]")
pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

import edge_runtime
from edge_export.errors import ExportError
from edge_export.onnx.request import OnnxRequest
from edge_export.pipeline.export import export_pair
from edge_export.pipeline.request import ExportRequest
from random_pairs import write_random_pair
from tiny_members import FULL

SEED = 4  # of the family 31b, without per-layer embeddings and experts
ALONE = {"attention_k_eq_v": False, "num_global_key_value_heads": None}
ONLY_FULL = {"layer_types": [FULL] * 2, "num_hidden_layers": 2}
SHARED = {"num_kv_shared_layers": 2}


def _request(folder: Path, tmp_path: Path, kind: str, verify: bool) -> ExportRequest:
    onnx = None if kind == "gguf" else OnnxRequest(target="f32", drafter="f32", device="static" if kind == "static" else None)
    return ExportRequest(
        target=str(folder / "target"),
        drafter=str(folder / "drafter"),
        output=tmp_path / "out" / "bundle",
        verify=verify,
        threads=1,
        gguf=kind == "gguf",
        target_quantization="f16",
        drafter_quantization="f16",
        onnx=onnx,
    )


HEADS = "attention heads of 24 values, and onnxruntime's GroupQueryAttention takes multiples of 16; export it with --format gguf"
LAYERS = r"sliding_window_pattern is \[False, False\], not .* so the runtime would refuse its GGUF; export it with --format onnx"


@pytest.mark.parametrize(
    ("both", "drafter", "refused", "words", "runs"),
    [
        ({"head_dim": 24}, {}, "onnx", f"sliding_{HEADS}", ("gguf", "static")),
        ({"global_head_dim": 24, "num_key_value_heads": 2}, {}, "onnx", f"full_{HEADS}", ("gguf",)),
        ({"global_head_dim": 24, "num_key_value_heads": 1}, {}, None, "", ("onnx",)),
        ({}, ONLY_FULL | SHARED, "gguf", LAYERS, ("onnx",)),
        (ONLY_FULL, SHARED, "gguf", LAYERS, ()),
    ],
)
def test_what_no_runtime_runs_is_not_written(
    both: dict[str, Any], drafter: dict[str, Any], refused: str | None, words: str, runs: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "pair"
    write_random_pair(SEED, folder, both=ALONE | both, drafter=drafter)
    (tmp_path / "out").mkdir()
    for verify in (True, False):
        if refused is not None:
            with pytest.raises(ExportError, match=words):
                export_pair(_request(folder, tmp_path, refused, verify))
            assert not list((tmp_path / "out").iterdir())
    for kind in runs:
        (tmp_path / kind / "out").mkdir(parents=True)
        bundle = export_pair(_request(folder, tmp_path / kind, kind, verify=True))
        assert "skipped" not in ((bundle.manifest.parity or {}).get("onnx") or bundle.manifest.parity or {})
        with edge_runtime.open_session(bundle.folder, context=96, threads=1) as session:
            assert list(session.generate([5] * 20, max_tokens=4).rounds())
