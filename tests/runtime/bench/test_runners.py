"""The sides of a benchmark: ours on scripted sessions, with several clients and for a meter, and llama.cpp's tools, which may fail."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench_records import PEER_PLAIN, fixed, rolling
from edge_bench.measure.energy import LOOP, energy_workloads
from edge_bench.measure.records import BASELINE, DEFAULT, LLAMA_CPP, OURS, Variant, trace_lines
from edge_bench.measure.request import Prompt, prepare, shipped_prompts
from edge_bench.measure.runners import EdgeRunner, LlamaTools, digest, llama_tools
from edge_bench.measure.sweeps import alone, run_level
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.drafting.cost_model import CostCurve, MeasuredCosts
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.session.open import open_session
from scripted import make_session, next_token, plain_greedy, scripted_sessions

PROMPT = Prompt(domain="d", number=0, ids=(1, 2, 3), text="a text")
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


OUTPUT = """encoded    3 tokens in    0.150 seconds, speed: 20 t/s
decoded   20 tokens in    0.500 seconds, speed: 40 t/s
n_drafted = 30
n_predict = 20
n_accept  = 12"""
BENCHED = '[ { "avg_ts": 80.0 } ]'


@pytest.fixture
def tools(tmp_path: Path):
    """Makes stand-ins that note their arguments and print what they are told to."""
    if os.name != "posix":
        pytest.skip("the stand-ins are shell scripts")

    def make(speculative: str = f"cat >&2 <<'X'\n{OUTPUT}\nX", bench: str = f"echo '{BENCHED}'", repack: bool = True) -> LlamaTools:
        for name, body in (("llama-speculative-simple", speculative), ("llama-bench", bench)):
            path = tmp_path / name
            path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> "{tmp_path}/arguments"\n{body}\n')
            path.chmod(0o755)
        return LlamaTools(tools=tmp_path, target=Path("t.gguf"), drafter=Path("d.gguf"), context=512, threads=2, repack=repack)

    return make


def asked(tools: LlamaTools) -> str:
    return " ".join((tools.tools / "arguments").read_text().splitlines())


def test_a_fixed_length(tools):
    side = tools(repack=False)
    run = side.run(fixed(4, LLAMA_CPP), PROMPT, 20)
    assert (run.tokens, run.seconds, run.drafted, run.accepted, run.output) == (20, 0.5, 30, 12, None)
    assert (run.prefill_seconds, run.first_token_seconds) == (0.15, None), "its prefill leaves out the last row"
    assert "-m t.gguf -t 2 -ngl 0 -md d.gguf --spec-type draft-mtp --spec-draft-n-max 4 --temp 0 -c 512 -n 20" in asked(side)
    assert asked(side).endswith("-p a text --no-repack")


def test_its_default_length(tools):
    side = tools()
    side.run(Variant(side=LLAMA_CPP, drafter="dense", policy=DEFAULT), PROMPT, 20)
    assert "n-max" not in asked(side)
    assert "repack" not in asked(side)


def test_plain_decoding_at_the_prompts_depth(tools):
    side = tools()
    run = side.run(PEER_PLAIN, PROMPT, 20)
    assert (run.tokens, run.seconds, run.drafted) == (20, 0.25, 0)
    assert "-p 0 -n 20 -d 3 -r 1" in asked(side)
    assert run.first_token_seconds == pytest.approx(3 / 80), "the prefill of three tokens, with logits of the last"
    assert "-p 3 -n 0 -r 1" in asked(side)


@pytest.mark.parametrize("repack", [True, False])
def test_plain_decoding_takes_no_kernels_that_crash_here(tools, repack):
    side = tools(repack=repack)
    side.run(PEER_PLAIN, PROMPT, 20)
    assert asked(side).count("--repack 0") == (0 if repack else 2)


@pytest.mark.parametrize(
    ("speculative", "words"),
    [
        ("echo nothing", "no figures in 12 runs"),
        ("echo broken model >&2; exit 3", "ended with exit code 3: broken model"),
        ("echo 'decoded 0 tokens in 0.1 seconds n_drafted = 1 n_accept = 1'", "not supported"),
        ("echo 'decoded 9 tokens in 0.1 seconds n_drafted = 1 n_accept = 2'", "not supported"),
    ],
)
def test_a_tool_that_fails_says_so(tools, speculative, words):
    with pytest.raises(BackendError, match=words):
        tools(speculative).run(fixed(4, LLAMA_CPP), PROMPT, 20)


@pytest.mark.parametrize("printed", ["nothing", "[]", "[{}]", '[{"avg_ts": 0}]', '[{"avg_ts": null}]'])
def test_a_bench_without_figures_says_so(tools, printed):
    with pytest.raises(BackendError, match="printed no figures"):
        tools(bench=f"echo '{printed}'").run(PEER_PLAIN, PROMPT, 20)


def test_a_folder_without_tools_is_refused(tmp_path):
    with pytest.raises(RequestError, match="has no llama-speculative-simple"):
        LlamaTools(tools=tmp_path, target=Path("t"), drafter=Path("d"), context=512, threads=2, repack=True)


def test_a_tool_that_cannot_run_says_so(tools):
    side = tools()
    (side.tools / "llama-bench").chmod(0o644)
    with pytest.raises(BackendError, match=r"could not be started .*llama-bench can be run"):
        side.run(PEER_PLAIN, PROMPT, 20)


@pytest.mark.peer
def test_the_real_tools_on_the_reference_pair(exported_pair, probe_memory):
    folder = os.environ.get("EDGE_MTP_LLAMA_CPP_BIN")
    if not folder:
        pytest.skip("needs llama.cpp's tools (EDGE_MTP_LLAMA_CPP_BIN names their folder)")
    with open_session(exported_pair, threads=1, drafter="dense", check="none") as session:
        prompts = prepare(shipped_prompts(["code", "chat"], 1), session)
        side, ours = llama_tools(session.bundle, Path(folder), context=session.target.context, threads=1), EdgeRunner(session)
        for prompt in prompts:
            run = side.run(fixed(3, LLAMA_CPP), prompt, 32)
            mine = ours.run(fixed(3), prompt, 32)
            assert run.tokens >= 32
            # Its text may be cut elsewhere and its ties fall otherwise, but it drafts after the same prompt with the same drafter.
            assert abs(run.accepted / run.drafted - mine.accepted / mine.drafted) < 0.35
        assert side.run(PEER_PLAIN, prompts[0], 16).tokens == 16
        assert side.run(Variant(side=LLAMA_CPP, drafter="dense", policy=DEFAULT), prompts[0], 16).drafted > 0


def test_tools_that_die_of_repacked_weights_run_without(tools):
    side = tools(bench=f"case \"$*\" in *--repack*) echo '{BENCHED}' ;; *) kill -SEGV $$ ;; esac")
    assert not side.tried().repack
    assert side.tried().run(PEER_PLAIN, PROMPT, 20).seconds == 0.25
    assert tools().tried().repack


def test_tools_take_a_bundles_files_where_no_library_is_installed(tools, exported_pair):
    """As in a device package for onnxruntime alone."""
    side = tools()
    actual = llama_tools(open_bundle(exported_pair), side.tools, context=256, threads=1)
    assert (actual.repack, actual.context) == (True, 256)
    assert actual.target.is_file()
    assert actual.drafter.is_file()


def test_a_build_is_named_by_number_and_commit(tools):
    assert tools(bench="""echo '[{"build_number": 7, "build_commit": "0c1e570"}]'""").build() == "b7 (0c1e570)"
