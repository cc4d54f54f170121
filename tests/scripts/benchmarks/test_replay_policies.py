"""Recorded drafts: what is replayed is what a session with that policy would have done."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import replay_policies as replayed
from edge_devices.files.user_cache import CACHE_VARIABLE
from edge_runtime.calibration import first_use
from edge_runtime.decoding.loop import Decoding, decode
from edge_runtime.drafting.acceptance_model import AcceptanceModel
from edge_runtime.drafting.cost_model import MAX_ROWS, CostCurve, MeasuredCosts
from edge_runtime.drafting.policies import DraftLengthPolicy, Fixed
from edge_runtime.drafting.profit_policy import Profit
from edge_runtime.session.open import open_session

DATA = Path(__file__).parents[2] / "data"
PROMPT = "class Stack:\n    def push"
COSTS = MeasuredCosts(verify=tuple(1.0 + 0.1 * n for n in range(13)), step=0.05)


@pytest.fixture(scope="module")
def recorded(exported_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "code.json").write_text(json.dumps([PROMPT]))
    result = CliRunner().invoke(
        replayed.main,
        ["record", str(exported_pair), "-o", str(folder / "drafts.jsonl"), "--prompts", str(folder / "code.json"), "--max-tokens", "40"],
    )
    assert result.exit_code == 0, result.output
    return folder / "drafts.jsonl"


@pytest.mark.parametrize("length", [0, 3, 7])
def test_rounds_of_a_fixed_length_come_out_as_in_the_loop(recorded: Path, exported_pair: Path, length: int) -> None:
    (text,) = replayed.read_texts(recorded)
    assert len(text.places) == 40
    with open_session(exported_pair, threads=1) as session:
        ids = session.vocabulary.encode(PROMPT)
        session.target.prefill(ids[:-1])
        rounds = list(decode(session.target, session.drafter, Decoding(session.target, ids[-1], Fixed(length), max_tokens=40)))
    replay = replayed.Replay.of(Fixed(length), [text], replayed.QuietMachine(CostCurve(COSTS)))
    spent = sum(item.drafted * COSTS.step + COSTS.verify[item.drafted] for item in rounds)
    # Kernels for different numbers of rows may part at a near-tie.
    assert replay.rate("code") == pytest.approx(40 / spent, rel=0.05)


def test_a_file_of_something_else_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("nothing to replay\n")
    (tmp_path / "costs").write_text("{}")
    result = CliRunner().invoke(replayed.main, ["replay", str(tmp_path / "notes"), "--costs", str(tmp_path / "costs")])
    assert result.exit_code == 1
    assert "is no recording" in result.output


def test_nobody_beats_the_one_who_knows(recorded: Path) -> None:
    (text,) = replayed.read_texts(recorded)
    bound = len(text.places) / replayed.clairvoyant(text, CostCurve(COSTS))
    policies = [Fixed(n) for n in range(13)] + [Profit(CostCurve(COSTS), AcceptanceModel())]
    rates = [replayed.Replay.of(policy, [text], replayed.QuietMachine(CostCurve(COSTS))).rate("code") for policy in policies]
    assert max(rates) <= bound * (1 + 1e-9)
    assert rates[-1] > rates[0]


def test_the_table_has_a_row_for_every_policy(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    first_use.COSTS.keep("a machine", COSTS, print)
    result = CliRunner().invoke(replayed.main, ["replay", str(recorded), "--costs", str(tmp_path / "measured.json"), "--longest", "4"])
    assert result.exit_code == 0, result.output
    for name in ("a machine", "fixed 1", "fixed 4", "profit", "clairvoyant", "code"):
        assert name in result.output


def kept(costs: MeasuredCosts, off: float, spread: float) -> MeasuredCosts:
    """What a probe may give on a busy machine: each figure wrong in its own way, drafts by a factor `off`."""
    dice = random.Random(5)
    verify = tuple(seconds * math.exp(dice.gauss(0, spread)) for seconds in costs.verify)
    return MeasuredCosts(verify=verify, step=costs.step * off, overhead=costs.overhead * off, timings=(1,) * MAX_ROWS)


@pytest.mark.parametrize("off", [None, 1.0, 20.0])
def test_on_a_busy_machine_profit_is_no_slower_than_rolling(off: float | None) -> None:
    """On the widened pair beside seven other programs, two cores for all, whatever was measured on such a machine before."""
    load, texts = replayed.read_load(DATA / "recorded_load.jsonl"), replayed.read_texts(DATA / "recorded_drafts.jsonl")
    clocks = [n * load.seconds / replayed.STARTS for n in range(replayed.STARTS)]

    def rate(make: Callable[[], DraftLengthPolicy]) -> float:
        return statistics.geometric_mean(replayed.speed_ups(make, texts, load, clocks).values())

    rolling = rate(replayed.policies_from(load.computed, 8)["rolling"])
    before = None if off is None else kept(load.computed, off, 0.5)
    profit = rate(lambda: Profit(CostCurve(load.computed, before), AcceptanceModel(), longest=8))
    assert rolling > 1.5
    assert profit > 0.95 * rolling


def test_a_load_is_timed_and_replayed(exported_pair: Path, tmp_path: Path) -> None:
    made = CliRunner().invoke(replayed.main, ["load", str(exported_pair), "-o", str(tmp_path / "load.jsonl"), "--seconds", "0.2"])
    assert made.exit_code == 0, made.output
    load = replayed.read_load(tmp_path / "load.jsonl")
    assert {sample.rows for sample in load.samples} == set(range(1, MAX_ROWS + 1))
    sample = load.samples[5]
    assert load.round(sample.clock + load.seconds, sample.steps, sample.rows) == (sample.draft_seconds, sample.verify_seconds)
    shown = CliRunner().invoke(
        replayed.main, ["replay", str(DATA / "recorded_drafts.jsonl"), "--load", str(tmp_path / "load.jsonl"), "--longest", "2"]
    )
    assert shown.exit_code == 0, shown.output
    assert "rolling" in shown.output


def test_first_answers_are_fast_on_a_small_pair_after_unlucky_starts_too(tmp_path: Path) -> None:
    """Whatever was computed; a policy that never drafts is far behind."""
    dice, lines = random.Random(1), []
    for _ in range(20):
        sure = [[round(dice.uniform(0.7, 1.0), 3) for _ in range(12)] for _ in range(30)]
        right = [next((n for n, chance in enumerate(place) if dice.random() > chance), 12) for place in sure]
        lines.append(json.dumps({"domain": "chat", "accepted": right, "confidences": sure}))
    (tmp_path / "drafts.jsonl").write_text("\n".join(lines))
    texts = replayed.read_texts(tmp_path / "drafts.jsonl")
    for unlucky in replayed.UNLUCKY:
        answers = replayed.first_answers(texts, 30, unlucky)
        assert not any(place.accepted for place in answers[0].places[:unlucky])
        for name, start in replayed.FIRST_COSTS.items():
            assert replayed.first_share(lambda start=start: replayed.new_profit(start), answers) > 0.9, (name, unlucky)
        assert replayed.first_share(lambda: Fixed(0), answers) < 0.6
    printed = CliRunner().invoke(replayed.main, ["first", str(tmp_path / "drafts.jsonl")])
    assert printed.exit_code == 0
    assert "no fixed part" in printed.output
