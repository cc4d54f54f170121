"""Parity detects a wrong export, and gives the reason when it cannot be measured."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("gguf", reason="needs edge-mtp[export]")


from edge_export.checkpoint.checkpoint import read_gguf_header
from edge_export.errors import ParityError
from edge_export.parity import reference
from edge_export.parity.comparison import Judgement
from edge_export.parity.gguf import UNQUANTIZED_LIMITS, ComparedModel, judgement_of
from edge_export.parity.reference import TEXT_TOKENS, Divergence, divergence
from edge_export.pipeline.export import export_pair
from edge_export.pipeline.request import ExportRequest
from edge_runtime.bundle.bundle import Quality
from edge_runtime.decoding.quality import KINDS, SKIPPED_ROWS, RowFigures, agrees
from edge_runtime.drafting.acceptance_model import AcceptanceModel
from progress_log import ProgressLog
from tiny_members import settled

Folders = Callable[[str], Path]


@pytest.fixture
def request_for(member_folder: Folders, tmp_path: Path) -> Callable[..., ExportRequest]:
    pytest.importorskip("llama_cpp", reason="llama.cpp runs the export")

    def made(member: str = "e2b", **changes: Any) -> ExportRequest:
        values: dict[str, Any] = {
            "target": str(settled(member_folder, member)),
            "drafter": str(settled(member_folder, f"{member}-assistant")),
            "output": tmp_path / "out",
            "target_quantization": "f16",
            "drafter_quantization": "f16",
            "threads": 1,
        }
        return ExportRequest(**values | changes)

    return made


@pytest.mark.parametrize("member", ["e2b", "31b", "26b-a4b"])
def test_a_sound_export_is_measured(member: str, request_for: Callable[..., ExportRequest]) -> None:
    result = export_pair(request_for(member, target_quantization="q8_0")).manifest.parity
    assert result is not None
    plain, final, drafts = result["unquantized"], result["quantized"], result["drafts"]
    assert 0 < plain["mean_kl"] < final["mean_kl"] < 0.05
    assert plain["greedy_agreement"] >= 0.95
    assert drafts["unquantized_agreement"] >= 0.95
    learned = AcceptanceModel.from_json(drafts["confidence"])
    assert learned is not None
    accept_prob = learned.forecast(1).accept_prob
    assert accept_prob[11] > 0.9 > accept_prob[0], "a confident drafter is right more often"
    assert len(drafts["contexts"]) == 8
    assert drafts["contexts"][0] > 32, "the first draft already stands past the sliding window"
    assert set(result["versions"]) == {"torch", "transformers", "llama-cpp-python"}
    quality = result["quality"]
    assert set(quality["texts"]) == set(KINDS)
    assert quality["rows"] == len(KINDS) * (TEXT_TOKENS - SKIPPED_ROWS - 1) > 500
    assert 0 < quality["mean_kl"] < 0.05
    assert quality["perplexity"] == pytest.approx(quality["reference_perplexity"], rel=0.05)
    assert json.loads(json.dumps(result)) == result


class Tampering(ProgressLog):
    """Makes half a tensor of a file zeros before the comparison; all of it would make equal logits, which are refused as such."""

    def __init__(self, folder: Path, role: str, tensor: str) -> None:
        super().__init__()
        self._folder, self._is_drafter, self._tensor = folder, role == "drafter", tensor

    def step(self, title: str, total_bytes: int | None) -> None:
        super().step(title, total_bytes)
        if title == "Compare with the reference":
            files = [path for path in self._folder.glob(".out.partial-*/*.gguf") if "unquantized" not in path.name]
            (path,) = (path for path in files if path.name.startswith("mtp-") is self._is_drafter)
            info = next(info for info in read_gguf_header(path).tensors if info.name == self._tensor)
            with path.open("r+b") as file:
                file.seek(info.offset)
                file.write(bytes(info.bytes // 2))


@pytest.mark.parametrize(
    ("quantization", "role", "tensor", "figure"),
    [
        ("f16", "target", "blk.1.attn_v.weight", "largest logit difference"),
        ("f16", "drafter", "blk.3.attn_output.weight", "share of the f16 export's drafts"),
        ("q8_0", "target", "token_embd.weight", "mean KL of the q8_0 export"),
    ],
)
def test_a_wrong_weight_refuses_the_bundle(
    quantization: str, role: str, tensor: str, figure: str, request_for: Callable[..., ExportRequest], tmp_path: Path
) -> None:
    with pytest.raises(ParityError, match=rf"parity failed: the {figure}.* is .*wanted.*; the bundle is refused \(--no-verify"):
        export_pair(request_for(target_quantization=quantization), Tampering(tmp_path, role, tensor))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("calibrates", "better", "ways"),
    [
        (True, "--target-quant q5_k_m, 269 MB", "; choose --calibrate TEXT or --target-quant q5_k_m, 269 MB; "),
        (False, "--target-quant q5_k_m, 269 MB", "; choose --target-quant q5_k_m, 269 MB; "),
        (True, None, "; choose --calibrate TEXT; "),
        (False, None, r"\(mean KL 0.8\); "),
    ],
)
def test_a_refusal_names_the_ways_to_better_answers(calibrates: bool, better: str | None, ways: str) -> None:
    judgement = Judgement(
        library="llama-cpp-python",
        noun="export",
        weight_type="bf16",
        quantization="q4_0",
        limits=UNQUANTIZED_LIMITS["bf16"],
        kl_limit=0.4,
        better=better,
        calibrates=calibrates,
    )
    quality = Quality(rows=501, mean_kl=0.8, perplexity=180, reference_perplexity=79, greedy_agreement=0.5)
    with pytest.raises(ParityError, match=rf"q4_0 export is 0.8, at most 0.4 is wanted.*{ways}the bundle is refused"):
        judgement._demand_quality(quality)


@pytest.mark.parametrize(
    ("package", "actual", "reason"),
    [
        ("torch", None, "torch is not installed"),
        ("transformers", None, "transformers is not installed"),
        ("transformers", "5.23.0", "transformers 5.23.0 is not known to build the Gemma 4 assistant, 5.19 to 5.22.2 and 5.24 can"),
        ("transformers", "4.57.1", "transformers 4.57.1 is not known to build"),
        ("transformers", "5.25.0", "transformers 5.25.0 is not known to build"),
        ("llama-cpp-python", None, "llama-cpp-python is not installed"),
    ],
)
def test_what_is_missing_is_the_reason_to_skip(package: str, actual: str | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0", "transformers": "5.22.2", "llama-cpp-python": "0.3.36"}
    monkeypatch.setattr(reference, "installed_version", lambda name: installed[name])
    pair = cast(Any, SimpleNamespace(parameters=1000, context=1024))
    installed: dict[str, str | None] = {**versions, package: actual}
    assert (reference.why_not(pair, "llama-cpp-python", "llama") or "").startswith(reason)
    for fit in ("5.19.0", "5.22.2", "5.24.0"):
        installed = versions | {"transformers": fit}
        assert reference.why_not(pair, "llama-cpp-python", "llama") is None


def test_a_reference_that_does_not_fit_is_not_started(memory_of: Any) -> None:
    pytest.importorskip("transformers")
    with memory_of(4_000_000):
        assert reference.why_no_reference(1_000_000) == "the float32 reference needs 4.8 MB of memory, 4.0 MB are available"
        assert reference.why_no_reference(500_000) is None
    with memory_of(None):
        assert reference.why_no_reference(1 << 60) is None


ROWS = RowFigures(kl=(0.001,), surprise=(2.0,), reference_surprise=(1.9,), agrees=(True,))


# Largest difference, mean KL, median KL and greedy agreement of the rows, share of equal drafts.
USUAL_ROWS = (0.1, 0.0049, 0.0051, 1.0, 1.0)
# Of four random pairs, in each of which rounding to f16 chose another expert, the worst of each figure.
OTHER_EXPERTS = (2.1, 0.007, 0.001, 0.92, 0.71)


@pytest.mark.parametrize(
    ("experts", "figures", "refused"),
    [
        (0, USUAL_ROWS, None),
        (128, USUAL_ROWS, r"the median KL of the f16 export is 0\.0051"),
        (128, OTHER_EXPERTS, None),
        (0, OTHER_EXPERTS, "the largest logit difference of the f16 export is 2.1"),
    ],
)
def test_with_experts_the_median_of_the_rows_is_judged(experts: int, figures: tuple[float, ...], refused: str | None) -> None:
    """A mean within the limit of few rows is refused where it is that of most rows."""
    model = ComparedModel(quantization="f16", weight_type="f16", unquantized=Path("a"), exported=Path("a"))
    largest, mean, median, greedy, drafts = figures
    actual = Divergence(max_abs_difference=largest, mean_kl=mean, median_kl=median, greedy_agreement=greedy)
    judgement, texts = judgement_of((model, model), experts), {"english": ROWS}
    with pytest.raises(ParityError, match=refused) if refused else nullcontext():
        judgement.figures(actual, actual, texts, length=80, agreements=[drafts, 1.0], contexts=(16,))


def test_divergence_figures() -> None:
    reference = np.array([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]], dtype=np.float32)
    assert dataclasses.astuple(divergence(reference, reference)) == (0.0, 0.0, 0.0, 1.0)
    swapped = np.array([[0.0, 1.0, 2.0], [0.0, 3.0, 0.0]], dtype=np.float32)
    actual = divergence(reference, swapped)
    weights = np.exp([3.0, 0.0, 0.0]) / np.exp([3.0, 0.0, 0.0]).sum()
    assert actual.max_abs_difference == 3.0
    assert actual.mean_kl == pytest.approx(3.0 * (weights[0] - weights[1]) / 2)
    assert actual.median_kl == pytest.approx(actual.mean_kl)
    assert actual.greedy_agreement == 0.5
    assert divergence(reference, np.full_like(reference, np.nan)).mean_kl == float("inf")
    assert agrees(np.array([1.0, 0.999, 0.0], dtype=np.float32), 1), "a tie within the noise"
    assert not agrees(np.array([1.0, 0.9, 0.0], dtype=np.float32), 1)
