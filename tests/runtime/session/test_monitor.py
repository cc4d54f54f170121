"""Windows, warnings, percentiles, the log and Prometheus' text: what they count, and when they speak."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.decoding.loop import Round
from edge_runtime.drafting.policies import AcceptanceWindow, Event
from edge_runtime.errors import RequestError
from edge_runtime.session.monitor import DecodeStats, Latencies, Metric, Monitor, MonitorOptions, Point, RequestMonitor, exposition
from edge_runtime.session.session import Session
from scripted import make_session, next_token

rounds = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda pair: (max(pair), min(pair))), max_size=80)


@given(rounds, st.integers(1, 60))
def test_the_window_is_the_last_drafted_tokens(outcomes, size):
    window, flat = AcceptanceWindow(size), []
    for drafted, accepted in outcomes:
        window.add(drafted, accepted)
        flat += [False] * accepted + [True] * (drafted - accepted)
        last = flat[-size:]
        assert window.drafted == len(last)
        assert window.full == (len(flat) >= size)
        assert window.rejection == (sum(last) / len(last) if last else None)


@given(rounds, st.integers(1, 30))
def test_a_threshold_is_reported_once_per_rise(outcomes, size):
    window, reported = AcceptanceWindow(size, (0.2, 0.3)), set()
    for drafted, accepted in outcomes:
        event = window.add(drafted, accepted)
        if not drafted:
            assert event is None
            continue
        rejection = window.rejection or 0.0
        above = {limit for limit in (0.2, 0.3) if window.full and rejection > limit}
        assert (event is not None) == bool(above - reported)
        if event is not None:
            assert event.limit == max(above - reported)
        reported |= above
        if window.full:
            reported -= {limit for limit in (0.2, 0.3) if rejection <= limit - 0.05}


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), min_size=1, max_size=30), st.integers(1, 100))
def test_percentiles_are_nearest_rank_over_tokens(measured, percent):
    latencies = Latencies()
    for seconds, tokens in measured:
        latencies.add(seconds, tokens)
    every = sorted(seconds / tokens for seconds, tokens in measured for _ in range(tokens))
    assert latencies.percentile(percent) == every[math.ceil(percent * len(every) / 100) - 1]
    assert latencies.count == len(every)


def test_latencies_forget_what_is_old_but_keep_their_sums():
    latencies = Latencies(keep=2)
    assert latencies.percentile(50) is None
    for seconds in (9.0, 1.0, 2.0):
        latencies.add(seconds)
    latencies.add(1.0, 0)
    assert (latencies.percentile(95), latencies.seconds, latencies.count) == (2.0, 12.0, 3)


def watched(options: MonitorOptions, wrong: bool) -> Session:
    return make_session(lambda context, _: (next_token(context) + wrong) % 17, monitor=Monitor(options))


def test_a_request_is_told_in_one_line(tmp_path: Path):
    received: list[Event] = []
    log = tmp_path / "log.jsonl"
    session = watched(MonitorOptions(window=8, log=log, on_event=received.append), wrong=True)
    for _ in range(2):
        generation = session.generate("abc", max_tokens=12, draft_length=2)
        generation.text()
        session.record(generation)
    first, second = (json.loads(line) for line in log.read_text().splitlines())
    assert first["stats"]["tokens"] == second["stats"]["tokens"] == 12
    assert first["finish_reason"] == "length"
    assert (first["settings"]["policy"], first["settings"]["draft_length"], first["settings"]["drafter"]) == ("fixed", 2, "dense")
    assert first["session"]["window_rejection_rate"] == 1.0
    assert 0 < first["latency"]["token_p50_seconds"] <= first["latency"]["token_p95_seconds"]
    assert first["latency"]["time_to_first_token_seconds"] > 0
    assert [event["limit"] for event in first["events"]] == [0.3]
    assert second["events"] == [], "told once, not every round"
    assert [event.sentence for event in received] == ["100% of the last 8 drafted tokens were rejected, more than 30%"]
    assert "abc" not in log.read_text(), "no text goes into the log"


def test_latency_is_the_rounds_own_time():
    watch = RequestMonitor(Monitor(), {})
    stats = DecodeStats()
    for seconds, tokens in ((0.5, (1,)), (0.9, (1, 2, 3))):
        stats.decode_seconds += seconds
        watch.record_round(Round(drafted=2, accepted=len(tokens) - 1, tokens=tokens), stats)
    assert watch.latencies.percentile(50) == pytest.approx(0.3)
    assert watch.latencies.percentile(95) == 0.5


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_log_may_be_a_pipe_that_somebody_reads(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(RequestError, match="cannot be appended to"):
        Monitor(MonitorOptions(log=pipe))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        Monitor(MonitorOptions(log=pipe))
    finally:
        os.close(reader)


def test_a_log_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(RequestError, match=r"cannot be appended to \(No such file.*; choose another file"):
        Monitor(MonitorOptions(log=tmp_path / "none" / "log"))


@pytest.mark.parametrize(("options", "words"), [({"window": 0}, "window is 0"), ({"warn_above": (1.5,)}, r"threshold is 1\.5")])
def test_nonsense_is_refused(options, words):
    with pytest.raises(RequestError, match=words):
        Monitor(MonitorOptions(**options))


def test_prometheus_reads_what_we_write():
    parser = pytest.importorskip("prometheus_client.parser", reason="needs edge-mtp[dev]")
    session = watched(MonitorOptions(window=8), wrong=True)
    empty = {family.name: family for family in parser.text_string_to_metric_families(session.monitor.prometheus_text())}
    assert empty["edge_mtp_tokens"].samples[0].value == 0
    assert "edge_mtp_rejection_ratio" not in empty
    for _ in range(3):
        generation = session.generate("abc", max_tokens=12, draft_length=2)
        generation.text()
        session.record(generation)
    families = {family.name: family for family in parser.text_string_to_metric_families(session.monitor.prometheus_text())}
    values = {(s.name, *s.labels.values()): s.value for family in families.values() for s in family.samples}
    assert values[("edge_mtp_requests_total",)] == 3
    assert values[("edge_mtp_prompt_tokens_total",)] == 9
    assert values[("edge_mtp_tokens_total",)] == values[("edge_mtp_token_seconds_count",)] == 36
    assert values[("edge_mtp_drafted_tokens_total",)] > values[("edge_mtp_accepted_tokens_total",)] == 0
    assert values[("edge_mtp_events_total", "rejection")] == 1
    assert values[("edge_mtp_rejection_ratio",)] == 1.0
    assert values[("edge_mtp_mean_acceptance_length",)] == 36 / values[("edge_mtp_rounds_total",)]
    assert 0 < values[("edge_mtp_token_seconds", "0.5")] <= values[("edge_mtp_token_seconds", "0.95")]
    assert values[("edge_mtp_time_to_first_token_seconds_count",)] == 3
    assert {family.type for family in families.values()} == {"counter", "gauge", "summary"}


def test_labels_and_help_are_escaped():
    parser = pytest.importorskip("prometheus_client.parser", reason="needs edge-mtp[dev]")
    text = 'back\\slash "quoted"\nnext'
    written = exposition([Metric(name="m", kind="gauge", description=text, samples=[Point(value=1.5, labels={"l": text})])])
    (family,) = parser.text_string_to_metric_families(written)
    assert family.documentation == text
    assert family.samples[0].labels == {"l": text}
