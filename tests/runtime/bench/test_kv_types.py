from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_bench.measure.sweeps import measure_kv_types
from edge_bench.report.tables import kv_table
from edge_runtime.backends.llama.loader import llama_library
from edge_runtime.bundle.gguf_header import KV_TYPES, KvType
from edge_runtime.errors import RequestError
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session

PAIR = Path(__file__).parents[3] / "exporter/edge_export/reference_pair"
# Stock kernels compute one row and several differently: by up to 0.15 in a logit with float16 weights and q4_0 K/V on AVX2.
NEAR_TIE = 0.3
PROMPTS: list[str] = json.loads((PAIR / "prompts.code.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("kv_type", "drafter"), [*((kv_type, "dense") for kv_type in KV_TYPES), ("q4_0", "split")])
def test_each_kv_type_is_lossless(exported_pair: Path, kv_type: KvType, drafter: str) -> None:
    """Token by token where the row kernels run; elsewhere outputs may part where plain decoding itself has a near tie."""
    exact = llama_library().row_kernels is not None
    with open_session(exported_pair, threads=1, drafter=drafter, kv_type=kv_type) as opened:  # type: ignore[arg-type]
        for prompt in PROMPTS[:4]:
            drafted, plain = (opened.generate(prompt, max_tokens=80, draft_length=length) for length in (3, 0))
            drafted.text()
            plain.text()
            assert drafted.stats.accepted > 0
            if exact or drafted.tokens == plain.tokens:
                assert drafted.tokens == plain.tokens
            else:
                assert margin(opened, prompt, plain.tokens, drafted.tokens) < NEAR_TIE


def margin(session: Session, prompt: str, plain: list[int], drafted: list[int]) -> float:
    """How far apart plain decoding's logits are for the two tokens at which the outputs part."""
    same = next(i for i, (left, right) in enumerate(zip(plain, drafted, strict=False)) if left != right)
    *before, last = session.vocabulary.encode(prompt) + plain[:same]
    session.target.rollback(0)
    session.target.prefill(before)
    (row,) = session.target.verify([last])
    return float(abs(row[plain[same]] - row[drafted[same]]))


def test_what_the_types_cost(exported_pair: Path) -> None:
    """On the pair: acceptance on the same text within 3 points of float16's, the distributions of q8_0 far nearer than those of q4_0."""
    costs = list(measure_kv_types(exported_pair, PROMPTS[:5], max_tokens=60, threads=1))
    assert [cost.kv_type for cost in costs] == list(KV_TYPES)
    f16, q8, q4 = costs
    assert f16.kl_max == 0
    assert f16.same_best == 1
    assert f16.tokens == q4.tokens > 200
    for cost in (q8, q4):
        assert cost.acceptance_rate == pytest.approx(f16.acceptance_rate, abs=0.03)
    assert 0 < 10 * q8.kl_mean < q4.kl_mean < 0.05
    assert q4.same_best > 0.9
    assert f16.cache_bytes / q4.cache_bytes == pytest.approx(32 / 9)
    assert [row[0] for row in kv_table(costs).rows] == list(KV_TYPES)


def test_float16_is_measured_first_though_not_asked_for(exported_pair: Path) -> None:
    costs = measure_kv_types(exported_pair, PROMPTS[:1], kv_types=["q8_0"], max_tokens=5, threads=1)
    assert [cost.kv_type for cost in costs] == ["f16", "q8_0"]
    with pytest.raises(RequestError, match="there is no prompt"):
        next(measure_kv_types(exported_pair, []))


def test_the_configuration_chooses_type_and_limit(exported_pair: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("speculative_decoding: {cache: {kv_type: q4_0, memory_limit: 1GB}}", encoding="utf-8")
    with open_session(exported_pair, threads=1, config=config) as opened:
        assert opened.target.kv_type == "q4_0"  # type: ignore[attr-defined]
    with open_session(exported_pair, threads=1, config=config, kv_type="q8_0") as opened:
        assert opened.target.kv_type == "q8_0"  # type: ignore[attr-defined]
    config.write_text("speculative_decoding: {cache: {memory_limit: 10MB}}", encoding="utf-8")
    with pytest.raises(RequestError, match=r"but the limit is 10\.0 MB"):
        open_session(exported_pair, threads=1, config=config)
    with open_session(exported_pair, threads=1, config=config, memory_limit="1GB"):
        pass
