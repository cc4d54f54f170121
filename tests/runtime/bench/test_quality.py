"""`edge-bench quality`: bundles beside a bundle, a checkpoint and llama.cpp's own figures."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_runs import bench, ran
from edge_bench.measure import quality
from edge_bench.measure.quality import BundleQuality, QualityResult
from edge_bench.report.html import quality_plots, quality_tables
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.manifest import Manifest
from edge_runtime.decoding.quality import KINDS, ReferenceText, RowFigures, held_out_text, joined, row_figures, text_rows
from edge_runtime.session.open import open_session
from kept import PAIR

QUICK = ("--tokens", "40", "--threads", "1", "--check", "none")


def figures(*words: Any) -> dict[str, Any]:
    result = ran("quality", *words, *QUICK, "--json", "-")
    record: dict[str, Any] = json.loads(result.stdout)
    return record


def test_a_bundle_beside_another(exported_pair: Path, quantized_pair: Path) -> None:
    record = figures(exported_pair, quantized_pair, "--against", exported_pair)
    assert record["reference"] == f"{exported_pair}, f16, llama.cpp"
    same, rounded = record["bundles"]
    assert (same["mean_kl"], same["greedy_agreement"], same["quantization"]) == (0, 1, "f16")
    assert 0.001 < rounded["mean_kl"] < 0.1
    assert rounded["rows"] == 3 * (40 - 9) == sum(rounded["texts"][kind]["rows"] for kind in KINDS)
    assert same["perplexity"] == rounded["reference_perplexity"] != rounded["perplexity"]
    assert rounded["target_bytes"] == open_bundle(quantized_pair).file("target", "gguf").bytes


def test_a_bundle_beside_its_checkpoint(exported_pair: Path) -> None:
    for library in ("torch", "transformers"):
        pytest.importorskip(library, reason="needs edge-mtp[verify]")
    record = figures(exported_pair, "--checkpoint", PAIR / "target")
    (actual,) = record["bundles"]
    assert record["warnings"] == []
    assert 0 < actual["mean_kl"] < 0.001
    assert actual["greedy_agreement"] > 0.97


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ((), 2, "give --checkpoint SOURCE or --against BUNDLE, one of them"),
        (("--checkpoint", "here", "--against", "there"), 2, "one of them"),
        (("--checkpoint", "no-such-folder"), 1, "the target no-such-folder does not exist; give a checkpoint folder"),
        (("--checkpoint", PAIR / "drafter"), 1, "is an assistant, not a full model"),
        (("--against", "no-such-bundle"), 1, "no-such-bundle"),
    ],
)
def test_what_cannot_be_a_reference_is_one_sentence(exported_pair: Path, words: tuple[Any, ...], code: int, sentence: str) -> None:
    result = bench("quality", exported_pair, *words, *QUICK)
    assert result.exit_code == code
    assert sentence in " ".join(result.stderr.split()).replace(" │ │ ", " ")
    assert "Traceback" not in result.output


def copied(bundle: Path, folder: Path, change: Callable[[Manifest], Manifest]) -> Path:
    """A copy of a bundle whose manifest says otherwise."""
    shutil.copytree(bundle, folder)
    (folder / "manifest.json").write_bytes(change(open_bundle(bundle).manifest).to_json().encode())
    return folder


def test_a_bundle_of_another_shape_is_refused(exported_pair: Path, tmp_path: Path) -> None:
    def larger(manifest: Manifest) -> Manifest:
        return replace(manifest, architecture=replace(manifest.architecture, hidden_size=4096))

    result = bench("quality", exported_pair, "--against", copied(exported_pair, tmp_path / "larger", larger), *QUICK)
    assert result.exit_code == 1
    assert "layers of 4096 values" in result.stderr
    assert "these are different models; compare forms of one" in result.stderr


def test_a_checkpoint_of_other_files_is_compared_with_a_warning(exported_pair: Path, tmp_path: Path) -> None:
    for library in ("torch", "transformers", "safetensors.torch"):
        pytest.importorskip(library, reason="needs edge-mtp[verify]")
    import safetensors.torch

    folder = Path(shutil.copytree(PAIR / "target", tmp_path / "tuned"))
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "saved": "once more"})
    (warning,) = figures(exported_pair, "--checkpoint", folder)["warnings"]
    assert warning.startswith(f"{exported_pair} was made from target, with other weights than {folder}")


def test_another_models_tokens_are_refused(exported_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.zeros((2, 5), np.float32)
    monkeypatch.setattr(quality, "read_reference", lambda *_: ReferenceText(tokens=(1, 2), logits=logits))
    result = bench("quality", exported_pair, "--against", exported_pair, *QUICK)
    assert result.exit_code == 1
    assert "read the english text as different tokens; compare forms of one model" in result.stderr


def test_without_the_exporter_a_checkpoint_is_refused(exported_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "find_spec", lambda _: None)
    result = bench("quality", exported_pair, "--checkpoint", PAIR / "target", *QUICK)
    assert result.exit_code == 1
    assert "pip install 'edge-mtp[export,verify]', or compare with a bundle by --against" in result.stderr


def measured(name: str, size: int, kl: float) -> BundleQuality:
    rows = RowFigures(kl=(kl, 3 * kl), surprise=(2.0, 3.0), reference_surprise=(2.0, 2.5), agrees=(True, False))
    return BundleQuality(bundle=name, backend="llama", quantization="q4_0", target_bytes=size, texts=dict.fromkeys(KINDS, rows))


def test_several_bundles_are_plotted_over_bytes() -> None:
    pytest.importorskip("matplotlib", reason="needs edge-mtp[report]")
    result = QualityResult(reference="model", engines={}, bundles=(measured("small", 10_000_000, 0.2), measured("large", 20_000_000, 0.1)))
    (table,) = quality_tables(result)
    assert [row[:6] for row in table.rows[:2]] == [
        ("small, q4_0, llama.cpp", "10", "all", "6", "0.4 ± 0.08", "12.18 (9.488)"),
        ("small, q4_0, llama.cpp", "10", "english", "2", "0.4 ± 0.1", "12.18 (9.488)"),
    ]
    (plot,) = quality_plots(result)
    assert "small, q4_0, llama.cpp" in plot.svg
    assert "bytes of the model, MB" in plot.svg
    assert quality_plots(QualityResult(reference="model", engines={}, bundles=result.bundles[:1])) == []


@pytest.mark.peer
def test_llama_perplexity_finds_the_same_kl(exported_pair: Path, quantized_pair: Path, tmp_path: Path) -> None:
    """Its chunks begin with the first token of a text, and it compares their second halves."""
    tool = Path(os.environ.get("EDGE_MTP_LLAMA_CPP_BIN", "nowhere")) / "llama-perplexity"
    if not tool.is_file():
        pytest.skip("needs llama-perplexity (EDGE_MTP_LLAMA_CPP_BIN names its folder)")
    length, text, file, base = 256, held_out_text("english")[:5000], tmp_path / "text", tmp_path / "base"
    file.write_text(text, encoding="utf-8")

    def run(bundle: Path, *words: str) -> str:
        model = open_bundle(bundle).path("target", "gguf")
        command = [tool, "-m", model, "--kl-divergence-base", base, "-c", str(length), "-b", str(length), "-t", "1", *words]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    run(exported_pair, "-f", str(file))
    # Lines are lost at times: another thread writes them, and the program ends without waiting for it.
    names = ("Mean    KLD", "Mean PPL(Q)", "Same top p")
    runs = (run(quantized_pair, "--kl-divergence") for _ in range(20))
    figures = ([re.search(rf"{re.escape(name)}\s*:\s*([\d.]+)", printed) for name in names] for printed in runs)
    theirs = next({name: float(match[1]) for name, match in zip(names, each, strict=True) if match} for each in figures if all(each))
    pieces: dict[str, RowFigures] = {}
    with (
        open_session(exported_pair, threads=1, check="none") as reference,
        open_session(quantized_pair, threads=1, check="none") as quantized,
    ):
        ids = reference.vocabulary.encode(text)
        for at in range(0, len(ids) - length + 1, length):
            tokens = [reference.vocabulary.bos, *ids[at + 1 : at + length]]
            rows = np.concatenate([piece.copy() for piece in text_rows(reference.target, tokens)])
            pieces[str(at)] = row_figures(rows, text_rows(quantized.target, tokens), tokens, first=length // 2)
    ours = joined(pieces).quality
    assert ours.mean_kl == pytest.approx(theirs["Mean    KLD"], rel=0.02)
    assert ours.perplexity == pytest.approx(theirs["Mean PPL(Q)"], rel=0.02)
