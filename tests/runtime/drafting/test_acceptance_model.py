"""The acceptance model and its cache."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_devices.files.user_cache import CACHE_VARIABLE
from edge_runtime.calibration.measured import AcceptanceCache, cache_file
from edge_runtime.drafting.acceptance_model import AcceptanceModel


def test_a_sure_drafter_is_expected_to_stay_sure() -> None:
    model = AcceptanceModel()
    sure, unsure = model.bin_of(0.999, 0), model.bin_of(0.3, 0)
    for _ in range(30):
        model.observe([sure, sure, sure], 3, 3)
        model.observe([unsure, unsure], 2, 1)
    known = model.forecast(4)
    assert known.further.shape == (5, 13)
    assert known.further[4][sure] > 2 * known.further[4][unsure]
    assert known.transition.sum(axis=1) == pytest.approx(1)
    assert known.first.sum() == pytest.approx(1)


def test_doubtful_drafts_that_are_left_out_of_a_verify_count_among_those_that_follow() -> None:
    """Half of the sure drafts are followed by a doubtful one, for which nothing is verified."""
    model = AcceptanceModel()
    sure, unsure = model.bin_of(0.999, 0), model.bin_of(0.3, 0)
    for _ in range(200):
        model.observe([sure, sure], 2, 2)
        model.observe([sure, unsure], 0, 0)
    follows = model.forecast(2).transition[sure]
    assert follows[unsure] == pytest.approx(0.5, abs=0.05)
    assert follows[sure] == pytest.approx(0.5, abs=0.05)


def test_what_follows_a_rejected_draft_counts_for_nothing() -> None:
    model = AcceptanceModel()
    before = model.forecast(3).transition
    model.observe([12, 3, 5], 2, 0)
    assert model.forecast(3).transition == pytest.approx(before)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 12), max_size=12), st.integers(0, 12), st.integers(0, 12)), max_size=40))
def test_counts_survive_json(rounds) -> None:
    model = AcceptanceModel()
    for bins, verified, accepted in rounds:
        verified = min(verified, len(bins))
        model.observe(bins, verified, min(accepted, verified))
    again = AcceptanceModel.from_json(json.loads(json.dumps(model.to_json())))
    assert again is not None
    before, after = model.forecast(12), again.forecast(12)
    assert after.accept_prob == pytest.approx(before.accept_prob, abs=1e-6)
    assert after.further == pytest.approx(before.further, abs=1e-5)
    assert not again.observed


def test_counts_are_cached_and_damaged_ones_ignored(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "new"))

    def accept_prob(cache: AcceptanceCache) -> float:
        return float(cache.model.forecast(1).accept_prob[8])

    cache = AcceptanceCache(["pair", "split"])
    cache.save()
    assert not (tmp_path / "new").exists(), "nothing was learned"
    for _ in range(50):
        cache.model.observe([8], 1, 0)
    cache.save()
    assert accept_prob(AcceptanceCache(["pair", "split"])) == pytest.approx(accept_prob(cache))
    assert accept_prob(AcceptanceCache(["pair", "dense"])) > 0.8
    exported = AcceptanceCache(["another pair"], exported=cache.model.to_json())
    assert accept_prob(exported) < 0.3, "what the bundle says comes before nothing"
    assert accept_prob(AcceptanceCache(["pair", "split"], exported=AcceptanceModel().to_json())) < 0.2, "and after what was seen here"
    assert accept_prob(AcceptanceCache(["another pair"], exported={"seen": "x"})) > 0.8
    path = cache_file()
    written = json.loads(path.read_text())
    (key,) = written
    good = written[key]
    for damage in (
        {"seen": [1]},
        3,
        {**good, "seen": ["x"] * 13},
        {**good, "stood": [1e5] * 13},
        {**good, "first": [-1.0] * 13},
        {**good, "follows": [[1e300] * 13] * 13},
        {**good, "first": [float("nan")] * 13},
    ):
        path.write_text(json.dumps({key: damage}))
        assert accept_prob(AcceptanceCache(["pair", "split"])) > 0.8


def test_confidence_counts_for_what_it_proved_to_be() -> None:
    model = AcceptanceModel()
    sure, unsure = model.bin_of(0.97, 0), model.bin_of(0.25, 0)
    assert model.forecast(1).accept_prob[sure] > 0.9
    for _ in range(60):
        model.observe([sure], 1, 0)
        model.observe([unsure], 1, 1)
    assert model.forecast(1).accept_prob[sure] < 0.2
    assert model.forecast(1).accept_prob[unsure] > 0.8
