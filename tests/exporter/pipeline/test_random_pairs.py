"""Pairs of every member with legal variations drawn at random, built by transformers: both formats equal two oracles.

transformers gives logits and drafts, llama.cpp's converter the GGUF files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx", reason="needs edge-mtp[export]")
pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
pytest.importorskip("transformers", reason="needs edge-mtp[verify]")
pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

from converter import SCRIPT, convert
from edge_export.checkpoint.sources import resolve_pair
from edge_export.gguf.writer import plan_gguf
from edge_export.onnx.request import OnnxRequest
from edge_export.pipeline.export import export_pair
from edge_export.pipeline.request import ExportRequest
from random_pairs import FAMILIES, WIDE_HEADS, write_random_pair

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_drafts")]
# Has as many K/V heads in full layers as in others. (Pairs whose rounding chooses another expert: parity/test_parity.py.)
EQUAL_HEADS = 2044
# What the converter cannot take of what transformers saves: text-only 12B, no key of experts, equal heads in all layers.
CONVERTER_FAULTS = ("Gemma4UnifiedForCausalLM is not supported", "'expert_intermediate_size'", "assert head_dim_full is not None")


def test_a_random_pair_equals_both_oracles(tmp_path: Path) -> None:
    _check_pair(write_random_pair(EQUAL_HEADS, tmp_path)[1:], tmp_path)


@pytest.mark.parametrize("seed", range(len(FAMILIES)))
def test_heads_of_the_published_sizes_equal_both_oracles(seed: int, tmp_path: Path) -> None:
    _check_pair(write_random_pair(seed, tmp_path, both=WIDE_HEADS)[1:], tmp_path)


def test_a_target_without_a_cap_is_not_capped(tmp_path: Path) -> None:
    """Where its key is missing llama.cpp caps logits at 30, which moves a logit of 9 by 0.3."""
    _, target, drafter = write_random_pair(5, tmp_path, both={"final_logit_softcapping": None}, matrices=2)
    figures = _exported(target, drafter, tmp_path / "bundle")["unquantized"]
    assert figures["mean_kl"] < 1e-4
    assert figures["max_abs_difference"] < 0.05


def _check_pair(folders: tuple[Path, ...], folder: Path) -> None:
    # The export itself judges the GGUF files' logits and drafts.
    parity = _exported(*folders, folder / "bundle")
    assert parity["unquantized"]["median_kl"] < 0.005
    assert parity["onnx"]["unquantized"]["mean_kl"] < 1e-6
    assert parity["onnx"]["drafts"]["unquantized_agreement"] > 0.99
    if SCRIPT.is_file():
        _check_converted(folders, folder)


def _exported(target: Path, drafter: Path, output: Path) -> dict[str, Any]:
    request = ExportRequest(
        target=str(target),
        drafter=str(drafter),
        output=output,
        target_quantization="f16",
        drafter_quantization="f16",
        onnx=OnnxRequest(target="f32", drafter="f32"),
    )
    return export_pair(request).manifest.parity or {}


def _check_converted(folders: tuple[Path, ...], folder: Path) -> None:
    """llama.cpp's converter writes the same bytes, where it takes the class and logits are capped: that they are not it leaves out."""
    message = convert([(path, folder / f"{path.name}.gguf", "bf16") for path in folders], may_fail=True)
    for source in resolve_pair(*map(str, folders)):
        theirs, ours = folder / f"{source.path.name}.gguf", folder / "ours.gguf"
        assert source.tokenizer is not None
        plan_gguf(source.checkpoint, "bf16", source.tokenizer).write(ours, lambda _: None)
        if theirs.is_file() and (source.role == "drafter" or source.checkpoint.architecture.logit_softcap is not None):
            assert ours.read_bytes() == theirs.read_bytes()
        elif not theirs.is_file():
            assert any(fault in message for fault in CONVERTER_FAULTS), message[-3000:]
