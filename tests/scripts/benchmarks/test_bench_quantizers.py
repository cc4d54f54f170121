"""The quantizer comparison runs on a checkpoint and tells the ways apart."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for library in ("torch", "transformers", "gguf", "llama_cpp"):
    pytest.importorskip(library, reason="the comparison runs transformers and llama.cpp's quantizer")
from click.testing import CliRunner

from edge_export.gguf.tensor_names import stays_float32
from edge_export.onnx.block_quantization import WeightSpec
from edge_export.onnx.request import OnnxRequest
from edge_export.quantization import calibration

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("bench_quantizers", ROOT / "scripts" / "benchmarks" / "bench_quantizers.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault("bench_quantizers", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


def test_every_way_is_compared(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "BLOCKS", (32,))
    monkeypatch.setattr(script, "GGUF_TYPES", ("q4_0",))
    monkeypatch.setattr(script, "EXPORTS", {"mixed": OnnxRequest(), "mixed, int4 embedding": OnnxRequest(embedding="int4")})
    monkeypatch.setattr(calibration, "MAX_CHUNKS", 2)
    # Two layers of the eight, and the table.
    prefixes = ("token_embd.", "blk.0.", "blk.1.")
    monkeypatch.setattr(script, "stays_float32", lambda name, rank: not name.startswith(prefixes) or stays_float32(name, rank))
    (tmp_path / "prompts.json").write_text(json.dumps(["def area(width, height):\n    return width * height\n"]))
    text = Path(json.__file__).read_text()
    (tmp_path / "text.txt").write_text(text)
    files = "--prompts", tmp_path / "prompts.json", "--text", tmp_path / "text.txt", "--json", tmp_path / "out.json"
    arguments = [*files, "--continuation", 8]
    result = CliRunner().invoke(script.main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    actual = json.loads((tmp_path / "out.json").read_text())
    assert actual["importance"]["bytes"] == len(text.encode())
    ways = {loss["way"]: loss for loss in actual["losses"]}
    assert len(ways) == 3 + 3 + 6
    for loss in ways.values():
        assert 0 < loss["kl"] < 0.3
        assert 0.5 < loss["greedy_agreement"] <= 1
        assert 4.2 < loss["bits"] < 7
        assert loss["way"] in result.output
    assert len({loss["kl"] for loss in ways.values()}) == len(ways), "no two ways give the same weights"


def test_tables_take_8_bits_and_blocks_divide_the_rows(script: Any) -> None:
    random = np.random.default_rng(1)
    weights = {
        name: random.standard_normal((4, width)).astype(np.float32) for name, width in (("token_embd.weight", 128), ("proj.weight", 32))
    }
    made, bits = script.rounded(weights, WeightSpec(bits=4, block=128, method="rtn"), None)
    assert bits == pytest.approx((128 * (8 + 32 / 128) + 32 * (4 + 32 / 32)) / 160)
    errors = {name: np.abs(made[name] - weights[name]).max() for name in weights}
    assert errors["token_embd.weight"] < 0.03 < errors["proj.weight"]


def test_exports_mix_as_the_graphs_do(script: Any) -> None:
    random = np.random.default_rng(1)
    names = ["token_embd.weight", "blk.0.attn_v.weight", "blk.0.proj.weight", "blk.0.ffn_up.weight"]
    weights = {name: random.standard_normal((4, 128)).astype(np.float32) for name in names}
    _, mixed = script.exported(weights, OnnxRequest(), None)
    _, plain = script.exported(weights, OnnxRequest(block=32), None)
    assert mixed == pytest.approx((2 * (8 + 32 / 128) + 8 + 32 / 32 + 4 + 32 / 128) / 4)
    assert plain == pytest.approx(5)


def test_files_with_a_prompt_in_them_are_left_out(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    for name in ("one.py", "two.py", "package/three.py", "package/notes.txt"):
        (tmp_path / name).write_text(f"# of {name}\n")
    monkeypatch.setattr(script.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert script.standard_library([]) == "# of one.py\n# of two.py\n# of package/three.py\n"
    assert script.standard_library([" of two.py\n"]) == "# of one.py\n# of package/three.py\n"
