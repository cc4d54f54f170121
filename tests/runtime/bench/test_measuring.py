"""Measuring on scripted sessions: our runner, phases, cost curves, several clients, what an energy protocol repeats."""

from __future__ import annotations

import json

import pytest

from bench_records import fixed, rolling
from edge_bench.measure.energy import LOOP, energy_workloads
from edge_bench.measure.records import BASELINE, OURS, Variant, trace_lines
from edge_bench.measure.request import Prompt
from edge_bench.measure.runners import EdgeRunner, digest
from edge_bench.measure.sweeps import alone, run_level
from edge_runtime.drafting.cost_model import CostCurve, MeasuredCosts
from scripted import make_session, next_token, plain_greedy, scripted_sessions

PROMPT = Prompt(domain="d", number=0, ids=(1, 2, 3), text="")
OTHER = Prompt(domain="d", number=1, ids=(4, 4), text="")
STEPPED = Variant(side=OURS, drafter="dense", policy="stepped")
PROFIT = Variant(side=OURS, drafter="dense", policy="profit")


@pytest.mark.parametrize("variant", [BASELINE, fixed(1), fixed(4), rolling(), STEPPED])
def test_every_variant_writes_what_plain_decoding_writes(variant):
    run = EdgeRunner(make_session()).run(variant, PROMPT, 30)
    assert run.output == digest(plain_greedy([1, 2, 3], 30))
    assert (run.tokens, run.prompt_tokens, sum(run.round_tokens)) == (30, 3, 30)
    assert sum(run.round_seconds) == pytest.approx(run.seconds)
    assert run.accepted == run.drafted == sum(run.drafted_at) == 30 - len(run.round_tokens)


def test_policies_and_lengths_draft_as_they_say():
    runner = EdgeRunner(make_session())
    lengths = {}
    for variant in (BASELINE, fixed(2), rolling(), STEPPED):
        runner.session.drafter.lengths.clear()
        runner.run(variant, PROMPT, 40)
        lengths[variant] = runner.session.drafter.lengths[:4]
    assert lengths == {BASELINE: [], fixed(2): [2, 2, 2, 2], rolling(): [2, 3, 4, 5], STEPPED: [2, 6, 6, 6]}


def test_a_policys_safety_net_is_its_own():
    runner = EdgeRunner(make_session(lambda c, _: (next_token(c) + 1) % 17))
    for _ in range(5):
        worst = runner.run(rolling(), PROMPT, 60)
    assert worst.drafted < 60, "the net stopped drafting"
    assert runner.run(STEPPED, PROMPT, 6).drafted > 0, "and did not reach another policy"
    assert runner.run(fixed(3), PROMPT, 60).drafted > 150, "nor fixed lengths"


def test_phases_are_parts_of_the_time():
    run = EdgeRunner(make_session()).run(fixed(4), PROMPT, 30)
    assert 0 < run.draft_seconds < run.seconds
    assert 0 < run.verify_seconds < run.seconds - run.draft_seconds


def test_profit_learns_from_run_to_run():
    asked = []

    def costs():
        asked.append(1)
        return CostCurve(MeasuredCosts(verify=(1.0,) * 13, step=0.01))

    runner = EdgeRunner(make_session(costs=costs))
    first, second = (runner.run(PROFIT, PROMPT, 60) for _ in range(2))
    assert first.output == second.output == digest(plain_greedy([1, 2, 3], 60))
    assert second.tokens / len(second.round_tokens) >= first.tokens / len(first.round_tokens) > 2
    assert asked == [1]


@pytest.mark.parametrize("variant", [BASELINE, fixed(3), rolling()])
def test_clients_at_once_get_what_they_would_get_alone(variant):
    prompts = [PROMPT, OTHER]
    expected = alone(make_session(), prompts, 12)
    assert expected == [plain_greedy([1, 2, 3], 12), plain_greedy([4, 4], 12)]
    batch, sessions = scripted_sessions(3)
    level = run_level(sessions, variant, prompts, expected, 12, 0)
    assert (level.clients, level.requests, level.tokens) == (3, 6, 72)
    assert (level.equal, level.compared) == (6, 6)
    assert len(level.request_seconds) == 6
    assert 0 < max(level.request_seconds) <= level.seconds
    assert len(level.token_seconds) < 72
    assert max(len(rows) for rows in batch.forwards) == 3


def test_outputs_of_several_clients_that_differ_are_counted():
    _, sessions = scripted_sessions(2)
    level = run_level(sessions, BASELINE, [PROMPT], [[0] * 12], 12, 0)
    assert (level.equal, level.compared) == (0, 2)


def test_each_round_is_a_line_of_the_trace():
    run = EdgeRunner(make_session()).run(fixed(3), PROMPT, 12)
    lines = [json.loads(line) for line in trace_lines([run, run])]
    assert [line["request"] for line in lines] == [0] * (len(lines) // 2) + [1] * (len(lines) // 2)
    rounds = lines[: len(lines) // 2]
    assert [line["round"] for line in rounds] == list(range(len(run.round_tokens)))
    assert (sum(line["num_draft_tokens"] for line in rounds), sum(line["num_accepted_tokens"] for line in rounds)) == (
        run.drafted,
        run.accepted,
    )
    by_position = [[line["num_accepted_tokens_per_pos"][n] for line in rounds if line["num_draft_tokens"] > n] for n in range(3)]
    assert tuple(map(sum, by_position)) == run.accepted_at
    assert {line["method"] for line in rounds} == {"dense 3"}


def test_energy_workloads_do_what_they_say():
    session = make_session()
    work = energy_workloads({"dense": EdgeRunner(session)}, [BASELINE, fixed(3)], [PROMPT, OTHER], 8)
    assert list(work) == ["plain", "dense 3", "calibrate:prefill", "calibrate:plain", "calibrate:verify", "calibrate:draft"]
    first, second = work["dense 3"](), work["dense 3"]()
    assert (first.emitted_tokens, first.prompt_tokens, second.prompt_tokens) == (8, 3, 2)
    assert set(first.phases) == {"prefill", "draft", "verify"}
    assert set(work["plain"]().phases) == {"prefill", "plain"}
    for name in ("calibrate:plain", "calibrate:verify", "calibrate:draft"):
        work[name].prepare()
    session.target.rows.clear()
    assert set(work["calibrate:plain"]().phases) == {"plain"}
    assert session.target.rows == [1] * LOOP
    session.target.rows.clear()
    assert set(work["calibrate:verify"]().phases) == {"verify"}
    assert session.target.rows == [4] * LOOP
    session.drafter.lengths.clear()
    assert set(work["calibrate:draft"]().phases) == {"draft"}
    assert session.drafter.lengths == [3] * LOOP
    assert set(work["calibrate:prefill"]().phases) == {"prefill"}


@pytest.mark.parametrize(("lengths", "prompt"), [((), None), ((1024, 2048), None), ((16, 512, 1024), 512), ((8,), 8)])
def test_the_joules_of_a_prompt_are_those_of_the_longest_that_takes_no_minutes(lengths, prompt):
    work = energy_workloads({"dense": EdgeRunner(make_session())}, [BASELINE], [PROMPT, OTHER], 8, lengths)
    names = [name for name in work if name.startswith("prompt")]
    assert names == ([] if prompt is None else [f"prompt {prompt}"])
    for name in names:
        each = work[name]()
        assert (each.emitted_tokens, each.prompt_tokens, set(each.phases)) == (0, prompt, {"prefill"})
