"""Requests on a scripted pair: text, stats, refusals, losslessness reports."""

from __future__ import annotations

import pytest

from edge_runtime.comparison import compare, comparison_table
from edge_runtime.errors import RequestError
from edge_runtime.lossless import check_lossless
from edge_runtime.policies import Fixed
from scripted import LetterVocabulary, make_session, plain_greedy


def test_pieces_arrive_round_by_round_and_make_the_whole_text():
    session = make_session()
    generation = session.generate([1, 2, 3], max_tokens=9)
    pieces = list(generation)
    assert len(pieces) <= 3 + 1
    assert generation.tokens == plain_greedy([1, 2, 3], 9)
    vocabulary = LetterVocabulary()
    assert "".join(pieces) == b"".join(vocabulary.piece(t) for t in generation.tokens).decode(errors="replace")


def test_stats_count_what_happened():
    session = make_session()
    generation = session.generate([1, 2, 3], max_tokens=9)
    generation.text()
    stats = generation.stats
    assert (stats.prompt_tokens, stats.tokens, stats.rounds) == (3, 9, 3)
    assert (stats.drafted, stats.accepted, stats.acceptance_rate) == (6, 6, 1.0)
    assert stats.acceptance_by_position == [1.0, 1.0]
    assert stats.tokens_per_round == 3.0
    assert 0 < stats.first_token_seconds <= stats.prefill_seconds + stats.decode_seconds
    assert stats.to_json()["drafted_tokens"] == 6


def test_time_the_consumer_takes_is_not_decode_time(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("edge_runtime.session.time.perf_counter", lambda: clock[0])
    generation = make_session().generate([1], max_tokens=6)
    for _ in generation.rounds():
        clock[0] += 100.0
    assert generation.stats.decode_seconds == 0.0


def test_one_session_serves_request_after_request():
    session = make_session()
    first = session.generate([4, 5], max_tokens=7)
    first.text()
    for _ in session.generate([9, 9, 9], max_tokens=3).rounds():
        break  # abandoned in the middle
    again = session.generate([4, 5], max_tokens=7)
    again.text()
    assert again.tokens == first.tokens


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ("", {}, "no tokens"),
        ([1] * 600, {}, "600 tokens"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"draft_length": 13}, "outside 0..12"),
    ],
)
def test_refusals_say_what_to_do(prompt, options, words):
    with pytest.raises(RequestError, match=words):
        make_session().generate(prompt, **options)


def test_lossless_report_says_equal():
    session = make_session()
    generation = session.generate([1, 2], max_tokens=20)
    generation.text()
    report = check_lossless(session, generation)
    assert report.equal
    assert "all 20 tokens" in report.sentence()


def test_lossless_report_names_the_first_divergence():
    session = make_session()
    generation = session.generate([1, 2], max_tokens=20)
    generation.text()
    honest = generation.tokens[7]
    generation.tokens[7] = (honest + 1) % 17
    report = check_lossless(session, generation)
    assert (report.equal, report.position, report.plain_token) == (False, 7, honest)
    assert report.logit_gap == 1.0
    assert "token 7" in report.sentence()


def test_comparison_runs_both_sides_in_turn():
    session = make_session()
    shown: list[str] = []
    comparison = compare(session, "abc", max_tokens=8, draft_length=None, repeats=2, show=shown.append)
    assert comparison.same_tokens
    assert [s.drafted for s in comparison.plain] == [0, 0]
    assert all(s.drafted > 0 for s in comparison.drafted)
    assert comparison.speed_up > 0
    assert comparison_table(comparison).row_count >= 8
    assert "drafts of 2" in "".join(shown)
    assert comparison.to_json()["draft_length"] == 2


def test_stop_token_ends_text():
    stop = plain_greedy([3, 1], 30)[4]
    session = make_session(eog=frozenset({stop}))
    generation = session.generate([3, 1], max_tokens=30, policy=Fixed(6))
    generation.text()
    assert generation.tokens == plain_greedy([3, 1], 30, frozenset({stop}))


def test_close_frees_drafter_and_target():
    with make_session() as session:
        pass
    assert session.target.closed
    assert session.drafter.closed
