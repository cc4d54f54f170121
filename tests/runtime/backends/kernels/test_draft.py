"""A draft in one call of the kernels: the reference's mathematics, the same on all variants, and the policy's own stop rule."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge_runtime.backends.kernels import loader

if not loader.usable_variants():
    pytest.skip("the row kernels were not built: pip install -e . builds them", allow_module_level=True)

from edge_runtime.backends.kernels.draft import DraftWeights, GgufMatrix, NativeDraft
from edge_runtime.drafting.acceptance_model import AcceptanceModel
from edge_runtime.drafting.cost_model import CostCurve, MeasuredCosts
from edge_runtime.drafting.profit_policy import Profit
from fuzzing.random_drafter import MATRICES, ROW_UNITS, RandomDrafters, Rows, Sizes

DENSE = Sizes(centroids=0)
# Matrices, rows of sources and centroids' tokens are cut into pieces that two threads share.
CUT = Sizes(hidden=256, feed=1024, dims=(64, 128), per_centroid=32)
STEPS = 5
Array = np.ndarray[Any, Any]


def floats(matrix: Any) -> Array:
    assert isinstance(matrix, GgufMatrix)
    assert matrix.type == 0
    return matrix.data.view(np.float32).reshape(matrix.outputs, matrix.inputs).astype(np.float64)


def norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * weight


def decoded(rows: Rows, part: int, dim: int) -> Array:
    """Keys or values as float64 [kv_heads, read rows, dim]."""
    data = (rows.keys, rows.values)[part]
    heads, count = data.shape[:2]
    if rows.type in (2, 3):
        blocks = data.reshape(heads, count, dim // 32, -1)
        scales = blocks[..., :2].copy().view(np.float16).astype(np.float64)
        if rows.type == 2:
            values = blocks[..., 2:].view(np.int8).astype(np.float64)
        else:
            values = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1).astype(np.float64) - 8
        values = (values * scales).reshape(heads, count, dim)
    else:
        values = data.view({0: np.float32, 1: np.float16, 4: np.int8}[rows.type]).astype(np.float64)
        if rows.scales is not None:
            values = values * rows.scales[part][:, None]
    return values if rows.cells is None else values[:, rows.cells]


def reference(weights: DraftWeights, sources: list[Rows], token: int, hidden: Array) -> tuple[Array, Array, Array]:
    """One step: the scores, whose tokens they are, and the next hidden row (transformers, Gemma4AssistantForCausalLM)."""
    row = floats(weights.before) @ np.concatenate([floats(weights.embedding)[token] * weights.factor, hidden])
    for layer in weights.layers:
        source, (queries, output, gates, values, down) = sources[layer.source], map(floats, layer.matrices)
        query = norm((queries @ norm(row, layer.norms[0])).reshape(weights.heads, layer.dim), layer.norms[1])
        low, high = query[:, : layer.dim // 2], query[:, layer.dim // 2 :]
        query = np.concatenate([low * source.cosine - high * source.sine, high * source.cosine + low * source.sine], axis=1)
        keys, kept = decoded(source, 0, layer.dim), decoded(source, 1, layer.dim)
        attended = []
        for head in range(weights.heads):
            own = head * len(keys) // weights.heads
            scores = keys[own] @ query[head]
            shares = np.exp(scores - scores.max())
            attended.append(shares / shares.sum() @ kept[own])
        row = row + norm(output @ np.concatenate(attended), layer.norms[2])
        fed = norm(row, layer.norms[3])
        gate = gates @ fed
        gate = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        row = (row + norm(down @ (gate * (values @ fed)), layer.norms[4])) * layer.factor
    row = norm(row, weights.norm)
    scores, tokens = floats(weights.rows) @ row, np.arange(weights.rows.outputs)
    if weights.sparse is not None:
        best = np.argsort(-(floats(weights.sparse.centroids) @ row))[: weights.sparse.top]
        each = weights.sparse.order.shape[1]
        scores, tokens = scores.reshape(-1, each)[best].ravel(), weights.sparse.order[best].ravel()
    return scores, tokens, floats(weights.after) @ row


class Drafted:
    """A drafter and its rows."""

    def __init__(self, weights: DraftWeights, sources: list[Rows], name: str | None = None) -> None:
        self.draft = NativeDraft(weights, longest=12, name=name)
        for place, rows in enumerate(sources):
            rows.describe(self.draft, place)

    def tokens_and_probabilities(self, token: int, hidden: Array, steps: int = STEPS) -> tuple[list[int], list[float]]:
        probabilities: list[float] = []
        tokens = self.draft.run(token, steps, hidden, None, lambda share: probabilities.append(share) or True)  # type: ignore[func-returns-value]
        self.draft.close()
        return tokens, probabilities


def made(kind: str, sizes: Sizes, types: tuple[int, int], seed: int = 1, *, listed: bool = False) -> tuple[DraftWeights, list[Rows], Array]:
    makes = RandomDrafters(np.random.default_rng(seed))
    weights = makes.weights(sizes, kind)
    shapes = zip(types, sizes.kv_heads, sizes.dims, (150, 37), strict=True)
    sources = [makes.rows(type_, heads, dim, count, listed=listed) for type_, heads, dim, count in shapes]
    return weights, sources, makes.random.standard_normal(sizes.target).astype(np.float32)


@pytest.mark.parametrize("type_", range(len(ROW_UNITS)))
@pytest.mark.parametrize("sizes", [Sizes(), DENSE])
@pytest.mark.parametrize("listed", [False, True])
def test_a_draft_is_the_references(type_: int, sizes: Sizes, listed: bool) -> None:
    weights, sources, hidden = made("f32", sizes, (type_, 0), listed=listed)
    tokens, probabilities = Drafted(weights, sources).tokens_and_probabilities(3, hidden)
    assert len(tokens) == len(probabilities) == STEPS
    last, row = 3, hidden.astype(np.float64)
    for token, probability in zip(tokens, probabilities, strict=True):
        scores, candidates, row = reference(weights, sources, last, row)
        shares = np.exp(scores - scores.max())
        last = int(candidates[scores.argmax()])
        assert token == last
        assert probability == pytest.approx(1 / shares.sum(), rel=1e-3)


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("sizes", [Sizes(), DENSE, Sizes(heads=6, kv_heads=(1, 6), dims=(32, 48), feed=64, top=8)])
def test_all_variants_draft_the_same(kind: str, sizes: Sizes) -> None:
    weights, sources, hidden = made(kind, sizes, (1, 1))
    results = [Drafted(weights, sources, name).tokens_and_probabilities(5, hidden) for name in loader.usable_variants()]
    assert all(result == results[0] for result in results)
    assert np.isfinite(results[0][1]).all()


def helped(kind: str, sizes: Sizes, rows: int) -> tuple[list[NativeDraft], list[Rows], Array]:
    """A drafter on one thread and the same one with a second."""
    makes = RandomDrafters(np.random.default_rng(3))
    weights, hidden = makes.weights(sizes, kind), makes.random.standard_normal(sizes.target).astype(np.float32)
    sources = [makes.rows(0, heads, dim, rows) for heads, dim in zip(sizes.kv_heads, sizes.dims, strict=True)]
    drafts = [NativeDraft(weights, longest=12, threads=threads) for threads in (1, 2)]
    for draft in drafts:
        for place, source in enumerate(sources):
            source.describe(draft, place)
    return drafts, sources, hidden


def helped_pieces(draft: NativeDraft) -> int:
    """How many pieces the second thread has run."""
    return int(draft._call.helped)


@pytest.mark.parametrize(("kind", "sizes"), [("f16", DENSE), ("int8", CUT)])
def test_a_second_thread_changes_no_number(kind: str, sizes: Sizes) -> None:
    """Over more spans of rows than are kept at once; the caller's choice takes longer than the thread stays awake."""
    drafts, sources, hidden = helped(kind, sizes, 2300)
    results, shares = [], list[float]()

    def goes_on(share: float) -> bool:
        shares.append(share)
        return True

    def slowly(scores: Array, _: Any) -> int:
        time.sleep(0.01)
        shares.extend(scores.tolist())
        return 1

    for draft in drafts:
        shares.clear()
        for token in range(12):
            draft.run(token, 8, hidden, None, goes_on)
        draft.run(3, 2, hidden, slowly)
        results.append(list(shares))
    assert results[0] == results[1]
    alone, shared = drafts
    started = time.monotonic()
    while not helped_pieces(shared) and time.monotonic() - started < 120:  # on one processor or a busy one it takes none at once
        shared.run(3, 8, hidden)
    assert helped_pieces(shared) > helped_pieces(alone) == 0, "the second thread has run no piece in two minutes"
    for draft in drafts:
        draft.close()
    assert len(sources) == len(sizes.dims)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_drafts_without_the_second_thread() -> None:
    drafts, sources, hidden = helped("int8", CUT, 300)
    expected, before = drafts[1].run(3, 3, hidden), helped_pieces(drafts[1])
    if (child := os.fork()) == 0:
        signal.alarm(120)  # which ends it, should it wait for a thread that it does not have
        code = 1
        try:
            same = drafts[1].run(3, 3, hidden) == expected and helped_pieces(drafts[1]) == before
            drafts[1].close()
            code = int(not same)
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert drafts[0].run(3, 3, hidden) == drafts[1].run(3, 3, hidden) == expected
    for draft in drafts:
        draft.close()
    assert len(sources) == len(CUT.dims)


def test_a_rotation_of_stored_rows_is_undone() -> None:
    weights, sources, hidden = made("f32", Sizes(), (0, 0))
    plain = Drafted(weights, sources).tokens_and_probabilities(3, hidden)
    turned = []
    for rows, dim in zip(sources, Sizes().dims, strict=True):
        hadamard = np.ones((1, 1))
        while len(hadamard) < 32:
            hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
        whole = np.kron(np.eye(dim // 32), hadamard / 32**0.5)
        parts = [(decoded(rows, part, dim) @ whole).astype(np.float32).view(np.uint8) for part in (0, 1)]
        turned.append(replace(rows, keys=parts[0], values=parts[1], turns=(32, 32)))
    tokens, probabilities = Drafted(weights, turned).tokens_and_probabilities(3, hidden)
    assert tokens == plain[0]
    np.testing.assert_allclose(probabilities, plain[1], rtol=1e-3)


def test_a_least_probability_ends_a_draft_before_the_first_token_below_it() -> None:
    weights, sources, hidden = made("int8", Sizes(), (1, 0))
    tokens, probabilities = Drafted(weights, sources).tokens_and_probabilities(3, hidden, 12)
    minimum = sorted(probabilities)[6]
    short = next(place for place, probability in enumerate(probabilities) if probability < minimum)
    assert Drafted(weights, sources).draft.run(3, 12, hidden, min_probability=minimum) == tokens[:short]


def test_a_chosen_token_is_the_next_steps_input_and_none_ends_the_draft() -> None:
    weights, sources, hidden = made("f32", Sizes(), (1, 0))
    offered: list[Array] = []

    def second_best(scores: Array, tokens: Array | None = None) -> int | None:
        assert tokens is not None
        assert len(set(tokens.tolist())) == len(scores) == 3 * 16
        offered.append(scores.copy())
        return None if len(offered) == 3 else int(tokens[np.argsort(scores)[-2]])

    tokens = Drafted(weights, sources).draft.run(3, 8, hidden, second_best)
    assert len(tokens) == 2
    scores, candidates, row = reference(weights, sources, 3, hidden.astype(np.float64))
    assert tokens[0] == candidates[np.argsort(scores)[-2]]
    np.testing.assert_allclose(offered[1], reference(weights, sources, tokens[0], row)[0], rtol=1e-3, atol=1e-3)


def test_an_error_of_the_caller_passes_through() -> None:
    weights, sources, hidden = made("f32", Sizes(), (1, 0))

    def fails(_: float) -> bool:
        raise KeyError("what the policy raised")

    drafted = Drafted(weights, sources)
    with pytest.raises(KeyError, match="what the policy raised"):
        drafted.draft.run(3, 8, hidden, None, fails)
    assert drafted.draft.run(3, 2, hidden) == drafted.draft.run(3, 2, hidden), "the next draft is sound"


def policies() -> Iterator[Profit]:
    random = np.random.default_rng(7)
    for _ in range(40):
        rows = np.cumsum(random.random(13) * random.choice([0.2, 1.0, 3.0])) * 1e-3 + 0.01
        costs = MeasuredCosts(verify=tuple(rows.tolist()), step=float(random.random() * 2e-3), overhead=float(random.random() * 1e-3))
        model = AcceptanceModel()
        for _ in range(20):
            bins = random.integers(0, 13, int(random.integers(1, 8))).tolist()
            verified = int(random.integers(0, len(bins) + 1))
            model.observe(bins, verified, int(random.integers(0, verified + 1)))
        yield Profit(CostCurve(costs), model, longest=12)


def test_the_profit_policys_rule_ends_drafts_where_the_policy_does() -> None:
    weights, sources, hidden = made("int8", Sizes(), (1, 0))
    draft = Drafted(weights, sources).draft
    lengths = set()
    for number, policy in enumerate(policies()):
        for any_prefix in (True, False):
            plan = policy.plan(any_prefix=any_prefix)
            if not plan.draft_length:
                continue
            assert plan.should_continue is not None
            tokens = draft.run(number, plan.draft_length, hidden, None, plan.should_continue)
            handed = policy.last
            again = policy.plan(any_prefix=any_prefix)
            asked = draft.run(number, again.draft_length, hidden, None, lambda share, rule=again.should_continue: rule(share))
            assert tokens == asked
            assert policy.last == handed
            lengths.add(len(tokens))
    assert len(lengths) > 3, "rules that end drafts at several lengths"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda weights, _: replace(weights, heads=3), "the matrices of a layer"),
        (lambda weights, _: replace(weights, heads=0), "its sizes"),
        (lambda weights, _: replace(weights, layers=weights.layers * 33), "its sizes"),  # more layers than any drafter has
        (lambda weights, makes: replace(weights, before=makes.matrix("f32", 64, 190)), "its projections"),
    ],
    ids=["heads", "no heads", "layers", "projection"],
)
def test_weights_that_do_not_fit_together_are_refused(change: Callable[[DraftWeights, RandomDrafters], DraftWeights], word: str) -> None:
    makes = RandomDrafters(np.random.default_rng(1))
    with pytest.raises(ValueError, match=word):
        NativeDraft(change(makes.weights(Sizes(), "f32"), makes), longest=3)


def test_an_order_of_tokens_beyond_the_vocabulary_is_refused() -> None:
    weights = RandomDrafters(np.random.default_rng(1)).weights(Sizes(), "f32")
    assert weights.sparse is not None
    weights.sparse.order[2, 1] = 128
    with pytest.raises(ValueError, match="the order of its tokens"):
        NativeDraft(weights, longest=3)
