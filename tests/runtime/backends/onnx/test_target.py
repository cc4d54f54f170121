"""The onnxruntime backend on the shipped pair: one cache for both models, and the same tokens with drafts as without."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

import edge_export
from edge_runtime.backends.onnx.drafter import OrtDrafter
from edge_runtime.backends.onnx.open import OrtOptions, open_onnx, open_pair
from edge_runtime.backends.onnx.target import OrtTarget, pair_of
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.errors import RequestError
from edge_runtime.session.open import open_session

WINDOW = 128
Bundles = Callable[[str], Path]
# Sums of float32 in another order; logits of the pair reach about 10.
TOLERANCE = 1e-4
PROMPTS = json.loads((Path(edge_export.__file__).parent / "reference_pair" / "prompts.code.json").read_text())


def options(**changes: Any) -> OrtOptions:
    return OrtOptions(**{"context": 1024, "threads": 1, **changes})


def random_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(300, 4096, count).tolist()


@pytest.fixture(scope="module")
def opened(onnx_pair: Bundles) -> Iterator[tuple[OrtTarget, OrtDrafter]]:
    target, drafter, kind = open_onnx(open_bundle(onnx_pair("f32")), options(), None)
    assert isinstance(drafter, OrtDrafter)
    assert kind == "split"
    with target:
        yield target, drafter


@pytest.fixture
def target(opened: tuple[OrtTarget, OrtDrafter]) -> OrtTarget:
    opened[0].rollback(0)
    return opened[0]


@pytest.fixture
def drafter(opened: tuple[OrtTarget, OrtDrafter]) -> OrtDrafter:
    return opened[1]


def buffers_of(owner: OrtTarget | OrtDrafter) -> dict[str, int]:
    """Addresses of the K/V buffers: of those that are bound once, as they are bound."""
    cache = (owner if isinstance(owner, OrtTarget) else owner._target).cache
    return {name: cache.values[name].data_ptr() if name in cache.values else cache.array(name).ctypes.data for name in cache.names}


def test_drafts_leave_greedy_output_as_it_is_token_for_token(onnx_pair: Bundles) -> None:
    with open_session(onnx_pair("f32"), threads=1, backend="onnx") as session:
        for prompt in PROMPTS[:4]:
            plain, drafted = (session.generate(prompt, max_tokens=160, draft_length=n) for n in (0, 4))
            assert plain.text() == drafted.text()
            assert plain.tokens == drafted.tokens
            assert drafted.stats.acceptance_rate is not None
            assert drafted.stats.acceptance_rate > 0.5


def test_rows_at_once_and_one_by_one_agree_also_after_roll_backs(target: OrtTarget) -> None:
    tokens = random_tokens(2, 40)
    target.prefill(tokens[:30])
    together = np.array(target.verify(tokens[30:]))
    target.rollback(30)
    target.verify(random_tokens(3, 8))
    target.rollback(30)
    single = np.concatenate([np.array(target.verify([token])) for token in tokens[30:]])
    np.testing.assert_allclose(together, single, atol=TOLERANCE)
    assert target.tokens.tolist() == tokens


def test_sliding_buffers_move_their_rows_and_nothing_changes(onnx_pair: Bundles, target: OrtTarget) -> None:
    files = pair_of(open_bundle(onnx_pair("f32")), drafter=True)
    long = tuple(dataclasses.replace(buffer, rows=4096) for buffer in files.layout.buffers)
    roomy, its_drafter = open_pair(dataclasses.replace(files, layout=dataclasses.replace(files.layout, buffers=long)), options())
    assert its_drafter is not None
    own_drafter = next(closer for closer in target.closers if isinstance(closer, OrtDrafter))
    tokens = random_tokens(4, 900)
    with roomy:
        assert target.cache.array("key.0").shape[2] < 420
        assert roomy.cache.array("key.0").shape[2] > 1000
        for one in (target, roomy):
            one.prefill(tokens[:700])
        assert target.cache.first > 0
        for begin in range(700, 890, 10):
            wanted, found = np.array(roomy.verify(tokens[begin : begin + 10])), np.array(target.verify(tokens[begin : begin + 10]))
            np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
            for one in (target, roomy):
                one.rollback(begin + 10 - begin % 7)
                one.verify(tokens[begin + 10 - begin % 7 : begin + 10]) if begin % 7 else None
            assert own_drafter.draft(tokens[begin + 10], 4) == its_drafter.draft(tokens[begin + 10], 4)
        assert roomy.cache.first == 0


def test_both_models_are_bound_to_the_same_memory(target: OrtTarget, drafter: OrtDrafter) -> None:
    before = buffers_of(target)
    target.prefill(random_tokens(5, 600))
    target.verify([300, 301])
    drafter.draft(302, 3)
    assert buffers_of(target) == buffers_of(drafter) == before
    for name, address in before.items():
        assert target.cache.array(name).ctypes.data == address
        assert np.abs(target.cache.array(name)[0, :, 0]).max() > 0, "the graph wrote its rows here"


def test_editing_the_targets_cache_changes_the_drafts(target: OrtTarget, drafter: OrtDrafter) -> None:
    target.prefill(random_tokens(6, 60))
    before = drafter.draft(300, 8)
    kept = target.cache.array("value.3").copy()
    target.cache.array("value.3")[:, :, :60] *= -3
    changed = drafter.draft(300, 8)
    target.cache.array("value.3")[...] = kept
    assert changed != before == drafter.draft(300, 8)


def test_rows_that_are_rolled_back_are_never_read(target: OrtTarget, drafter: OrtDrafter) -> None:
    target.prefill(random_tokens(7, 50))
    wanted = np.array(target.verify([300, 301])), drafter.draft(302, 4)
    target.rollback(50)
    for name in target.cache.names:
        target.cache.array(name)[:, :, 50:] = np.nan
    found = np.array(target.verify([300, 301])), drafter.draft(302, 4)
    np.testing.assert_array_equal(found[0], wanted[0])
    assert found[1] == wanted[1]


def scores_of(drafter: OrtDrafter, last: int) -> np.ndarray[Any, Any]:
    seen: list[np.ndarray[Any, Any]] = []

    def sampler(scores: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any] | None = None) -> int:
        assert tokens is not None
        order = np.argsort(tokens)
        seen.append(scores[order].copy())
        return int(tokens[scores.argmax()])

    drafter.draft(last, 1, sampler)
    return seen[0]


def test_the_drafters_window_is_the_references(target: OrtTarget, drafter: OrtDrafter) -> None:
    """Distances up to and including the window: one row more than the target's own layers see."""
    target.prefill(random_tokens(8, 200))
    before, values = scores_of(drafter, 300), target.cache.array("value.2")
    values[:, :, 200 - WINDOW - 2] += 50
    np.testing.assert_array_equal(scores_of(drafter, 300), before)
    values[:, :, 200 - WINDOW - 1] += 50
    assert np.abs(scores_of(drafter, 300) - before).max() > 1e-3


def test_a_choosing_host_gets_candidates_and_its_choice_is_taken(target: OrtTarget, drafter: OrtDrafter) -> None:
    target.prefill(random_tokens(9, 30))
    offered: list[np.ndarray[Any, Any]] = []

    def second_best(scores: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any] | None = None) -> int:
        assert tokens is not None
        assert scores.shape == tokens.shape == (8 * 64,)
        offered.append(tokens.copy())
        return int(tokens[np.argsort(scores)[-2]])

    chosen = drafter.draft(300, 3, second_best)
    assert len(chosen) == 3
    assert all(len(set(tokens.tolist())) == 512 for tokens in offered)
    assert chosen != drafter.draft(300, 3)


def test_the_loop_and_single_steps_draft_the_same(target: OrtTarget, drafter: OrtDrafter) -> None:
    for seed in range(8):
        target.rollback(0)
        target.prefill(random_tokens(seed, 20 + seed))
        loop = drafter.draft(300 + seed, 6)
        steps = drafter.draft(300 + seed, 6, lambda scores, tokens=None: int(tokens[scores.argmax()]))
        assert loop == steps


def test_an_unsure_drafter_stops_early(onnx_pair: Bundles) -> None:
    files = pair_of(open_bundle(onnx_pair("f32")), drafter=True)
    target, drafter = open_pair(files, options())
    assert drafter is not None
    with target:
        target.prefill(random_tokens(10, 30))
        whole = drafter.draft(300, 12)
        lengths = []
        for least in (0.05, 0.3, 0.6, 1.1):
            drafter.least_probability = least
            drafts = drafter.draft(300, 12)
            assert drafts == whole[: len(drafts)]
            lengths.append(len(drafts))
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[-1] == 0 < lengths[0]
        assert len(drafter.draft(300, 3, lambda scores, tokens=None: int(tokens[0]))) == 3, "what the host chose is kept"


def test_the_draft_starts_from_the_last_kept_row_or_not_at_all(target: OrtTarget, drafter: OrtDrafter) -> None:
    assert drafter.draft(300, 3) == []
    tokens = random_tokens(11, 20)
    target.prefill(tokens[:10])
    straight = drafter.draft(tokens[10], 4)
    target.verify(tokens[10:15])
    target.rollback(10)
    assert drafter.draft(tokens[10], 4) == [], "the row before the newest batch is gone"
    target.rollback(9)
    target.verify([tokens[9], 301, 302])
    target.rollback(10)
    assert drafter.draft(tokens[10], 4) == straight


def test_sampling_with_drafts_equals_sampling_without_by_match(onnx_pair: Bundles) -> None:
    from edge_runtime.decoding.sampling import SamplingParams

    sampling = SamplingParams(temperature=0.8, top_k=40, seed=5)
    with open_session(onnx_pair("f32"), threads=1) as session:
        outputs = []
        for length in (0, 3):
            generation = session.generate(PROMPTS[1], max_tokens=80, draft_length=length, sampling=sampling, acceptance="match")
            generation.text()
            outputs.append(generation.tokens)
        assert outputs[0] == outputs[1]
        rejection = session.generate(PROMPTS[1], max_tokens=80, draft_length=3, sampling=sampling, acceptance="rejection")
        assert rejection.text()
        assert rejection.stats.acceptance_rate is not None
        assert rejection.stats.acceptance_rate > 0.1


def test_what_cannot_be_done_is_refused_and_leaves_the_cache(target: OrtTarget, drafter: OrtDrafter) -> None:
    target.prefill(random_tokens(12, 1000))
    for call, words in (
        (lambda: target.prefill([300] * 25), "exceed the context of 1024"),
        (lambda: target.verify([300] * 14), "14 rows are too many"),
        (lambda: target.verify([4096]), "not in the vocabulary of 4096"),
        (lambda: target.verify([]), "give at least one"),
        (lambda: target.rollback(1001), "the cache holds 1000 rows"),
        (lambda: target.rollback(300), "older rows are gone"),
        (lambda: drafter.draft(300, 13), "longer than the 12"),
        (lambda: drafter.draft(-1, 2), "not in the vocabulary"),
    ):
        with pytest.raises(RequestError, match=words):
            call()
        assert target.length == 1000
    target.rollback(1000 - target.rewind_slack)


def test_closing_closes_the_drafter_too(onnx_pair: Bundles) -> None:
    target, drafter, _ = open_onnx(open_bundle(onnx_pair("f32")), options(), None)
    assert drafter is not None
    target.close()
    target.close()
    for call in (lambda: target.prefill([300]), lambda: target.rollback(0), lambda: drafter.draft(300, 1)):
        with pytest.raises(RequestError, match="is closed"):
            call()


def test_the_context_can_be_filled_to_its_last_row(onnx_pair: Bundles) -> None:
    with open_session(onnx_pair("int4"), threads=1, context=40) as session:
        generation = session.generate(random_tokens(13, 30), max_tokens=100, draft_length=4)
        generation.text()
        assert session.target.length == 40
        assert len(generation.tokens) == 11


def test_every_node_runs_on_the_cpu_and_the_report_says_so(target: OrtTarget, drafter: OrtDrafter) -> None:
    graphs = {**target.assignments(), "drafter": drafter.assignments()}
    assert len(graphs) == 3
    for providers in graphs.values():
        assert set(providers) == {"CPUExecutionProvider"}
    assert graphs["target-f32.onnx"]["CPUExecutionProvider"]["GroupQueryAttention"] == 6


def test_a_host_that_finds_no_candidate_ends_the_draft(target: OrtTarget, drafter: OrtDrafter) -> None:
    target.prefill(random_tokens(15, 30))
    answers: Iterator[int | None] = iter([301, 302, None, 303])
    assert drafter.draft(300, 6, lambda scores, tokens=None: next(answers)) == [301, 302]
