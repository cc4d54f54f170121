"""The comparison with llama.cpp's quantizer: it goes on where it was, and leaves the model as it was."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

for library in ("torch", "transformers", "gguf", "llama_cpp"):
    pytest.importorskip(library, reason="the comparison runs transformers and llama.cpp's quantizer")
import gguf
from click.testing import CliRunner

from edge_export.checkpoint.checkpoint import open_checkpoint
from edge_export.checkpoint.sources import reference_pair
from random_pairs import write_random_pair

sys.path.append(str(Path(__file__).parents[3] / "scripts" / "benchmarks"))
import bench_quantizers


def test_ways_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The script sets it.
    monkeypatch.setattr(bench_quantizers.calibration, "MAX_CHUNKS", 1)
    _, target, _ = write_random_pair(14, tmp_path)
    words = ["--target", str(target), "--tokens", "40", "--pieces", "1", "--threads", "1"]
    files = ["--keep", str(tmp_path / "keep"), "--json", str(tmp_path / "made.json")]
    for only in ("ONNX int8", "GGUF q4_0"):
        result = CliRunner().invoke(bench_quantizers.main, [*words, *files, "--only", only])
        assert result.exit_code == 0, result.output
    made = {loss["way"]: loss for loss in json.loads((tmp_path / "made.json").read_text())}
    assert list(made) == ["ONNX int8, calibrated", "ONNX int8 in blocks of 128, calibrated", "GGUF q4_0, calibrated"]
    small, large, four = made.values()
    assert 0 < small["mean_kl"] < large["mean_kl"] < four["mean_kl"]
    assert four["bytes"] < large["bytes"] < small["bytes"]
    assert {loss["reference_perplexity"] for loss in made.values()} == {small["reference_perplexity"]}
    assert small["rows"] == 3 * (40 - 9)


def test_llama_cpp_has_its_own_mix(tmp_path: Path) -> None:
    """The project's q4_k_m raises all layers of ffn_down to 6 bits, llama.cpp's half of them; and it has types that no export offers."""
    plain, made = tmp_path / "plain.gguf", tmp_path / "made.gguf"
    bench_quantizers.write_gguf(open_checkpoint(reference_pair()[0]), plain, "bf16", lambda _: None)

    def types(kind: str) -> Counter[str]:
        tensors = gguf.GGUFReader(made).tensors
        return Counter(each.tensor_type.name for each in tensors if kind in each.name)

    bench_quantizers.quantize_gguf(plain, made, "q4_k_m", 1)
    assert types("ffn_down") == {"Q6_K": 8}
    bench_quantizers.llama_quantize(plain, made, "q4_k_m", 1, None)
    assert types("ffn_down") == {"Q6_K": 4, "Q4_K": 4}
    bench_quantizers.llama_quantize(plain, made, "iq4_nl", 1, None)
    assert types("ffn_gate") == {"IQ4_NL": 8}
