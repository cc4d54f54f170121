"""Requests on a scripted pair: text, stats, refusals, losslessness reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_devices.energy.intervals import of_error
from edge_devices.meters.base import Kind, MeterFacts, Scope
from edge_runtime.cli.compare import compare_runs, comparison_table
from edge_runtime.decoding.loop import Round
from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.drafting.policies import PolicyOptions, Stepped
from edge_runtime.errors import RequestError
from edge_runtime.session.self_checks import check_lossless
from scripted import make_session


def test_stats_count_what_happened():
    session = make_session()
    generation = session.generate([1, 2, 3], max_tokens=9)
    generation.text()
    stats = generation.stats
    assert (stats.prompt_tokens, stats.tokens, stats.rounds) == (3, 9, 3)
    assert (stats.drafted, stats.accepted, stats.acceptance_rate) == (6, 6, 1.0)
    assert stats.acceptance_by_position == [1.0, 1.0]
    assert stats.mean_acceptance_length == stats.to_json()["mean_acceptance_length"] == 3.0
    assert 0 < stats.first_token_seconds <= stats.prefill_seconds + stats.decode_seconds
    assert stats.to_json()["drafted_tokens"] == 6


def test_time_the_consumer_takes_is_not_decode_time(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("edge_runtime.session.generation.time.perf_counter", lambda: clock[0])
    generation = make_session().generate([1], max_tokens=6)
    for _ in generation.rounds():
        clock[0] += 100.0
    assert generation.stats.decode_seconds == 0.0


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ("", {}, "no tokens"),
        ([1] * 600, {}, "600 tokens"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"draft_length": 13}, "outside 0..12"),
        ([1], {"chunk_size": 0}, "chunk_size is 0"),
        ([1], {"stop": ["x", ""]}, "0 characters"),
        ([1], {"stop": 5}, "stop is 5; give texts"),
        ([1], {"logprobs": 999}, "logprobs is 999; ask for 0 to 20"),
        ([1], {"logprobs": -1}, "logprobs is -1"),
        ([1], {"logprobs": True}, "logprobs is True"),
        ([1], {"acceptance": "luck"}, "'luck' is not known"),
        ([1], {"sampling": SamplingParams(logit_bias={17: 1.0})}, "names token 17; the vocabulary ends at 16"),
    ],
)
def test_refusals_say_what_to_do(prompt, options, words):
    with pytest.raises(RequestError, match=words):
        make_session().generate(prompt, **options)


def test_lossless_report_says_equal_or_names_the_first_divergence():
    session = make_session()
    generation = session.generate([1, 2], max_tokens=20)
    generation.text()
    report = check_lossless(session, generation)
    assert report.equal
    assert "all 20 tokens" in report.sentence()
    honest = generation.tokens[7]
    generation.tokens[7] = (honest + 1) % 17
    report = check_lossless(session, generation)
    assert (report.equal, report.position, report.plain_token) == (False, 7, honest)
    assert report.logit_gap == 1.0
    assert "token 7" in report.sentence()


def test_comparison_runs_both_sides_in_turn():
    session = make_session()
    shown: list[str] = []
    comparison = compare_runs(session, "abc", max_tokens=8, draft_length=None, repeats=2, show=shown.append, shown_prompt="abc")
    assert comparison.same_tokens
    assert [s.drafted for s in comparison.plain] == [0, 0]
    assert all(s.drafted > 0 for s in comparison.drafted)
    assert comparison.speed_up > 0
    assert comparison_table(comparison).row_count >= 8
    assert "policy profit" in "".join(shown)
    assert comparison.to_json()["draft_length"] is None
    assert comparison.drafting == "policy profit"
    assert (
        compare_runs(session, "abc", max_tokens=4, draft_length=2, repeats=1, show=shown.append, shown_prompt="abc").drafting
        == "drafts of 2"
    )


def test_a_comparison_says_what_its_joules_are_of():
    comparison = compare_runs(make_session(), "abc", max_tokens=4, draft_length=2, repeats=1, show=lambda _: None, shown_prompt="abc")
    facts = MeterFacts(name="nvml:0", kind=Kind.COUNTER, scope=Scope.GPU, source="", refresh_s=0.1, resolution=0.001, poll_s=0.1)
    scope = "energy: scope gpu_board (the GPU's board, not the whole machine), idle power included"
    for figure in (of_error(1.0, 0.05, freedom=4, n=5), None):
        energy = replace(comparison.drafted_energy, facts=facts, joules_per_token=figure)
        remarks = replace(comparison, drafted_energy=energy).remarks()
        assert (scope in remarks) == (figure is not None)


def test_close_frees_drafter_and_target():
    with make_session() as session:
        pass
    assert session.target.closed
    assert session.drafter.closed


def whole_text(max_tokens: int) -> str:
    return make_session().generate([1, 2, 3], max_tokens=max_tokens, draft_length=0).text()


@pytest.mark.parametrize("draft_length", [0, 1, 4, 12])
@pytest.mark.parametrize("place", [0, 1, 7, 20])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_stop_strings_end_tokens_text_and_cache_where_plain_decoding_does(draft_length, place, size):
    stop = whole_text(40)[place : place + size]
    plain = make_session().generate([1, 2, 3], max_tokens=40, draft_length=0, stop=[stop])
    text = plain.text()
    assert text == whole_text(40).partition(stop)[0]
    session = make_session()
    generation = session.generate([1, 2, 3], max_tokens=40, draft_length=draft_length, stop=[stop])
    assert generation.text() == text
    assert generation.tokens == plain.tokens
    assert generation.stopped_by == stop
    assert session.target.cache == [1, 2, 3, *generation.tokens][:-1]
    assert generation.stats.tokens == len(generation.tokens)


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 100])
def test_pieces_have_at_least_the_asked_tokens(chunk_size):
    generation = make_session().generate([1, 2, 3], max_tokens=30, draft_length=2, chunk_size=chunk_size)
    sizes, before = [], 0
    for piece in generation:
        assert piece
        sizes.append(len(generation.tokens) - before)
        before = len(generation.tokens)
    assert all(size >= chunk_size for size in sizes[:-1])
    assert sum(sizes) == 30
    assert "".join(make_session().generate([1, 2, 3], max_tokens=30, chunk_size=chunk_size)) == whole_text(30)


def test_rounds_are_told_before_their_text():
    reported: list[Round] = []
    generation = make_session().generate([1, 2, 3], max_tokens=9, on_round=reported.append)
    for _ in generation:
        assert sum(len(item.tokens) for item in reported) == len(generation.tokens)
    assert len(reported) == generation.stats.rounds


def test_a_policy_is_told_what_happened():
    generation = make_session().generate([1, 2, 3], max_tokens=60, policy=Stepped(PolicyOptions()))
    rounds = [item.drafted for item in generation.rounds()]
    assert rounds[:3] == [2, 6, 6]


def test_losslessness_of_a_seeded_match_is_checked_token_by_token():
    session = make_session()
    generation = session.generate([1, 2], max_tokens=20, sampling=SamplingParams(seed=3), acceptance="coupled")
    generation.text()
    assert check_lossless(session, generation).equal
    other = session.generate([1, 2], max_tokens=20, sampling=SamplingParams(seed=3), acceptance="block")
    with pytest.raises(RequestError, match="differ from run to run"):
        check_lossless(session, other)
