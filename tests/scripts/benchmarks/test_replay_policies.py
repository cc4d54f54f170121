"""Recorded drafts: what is replayed is what a session with that policy would have done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import replay_policies as replayed
from edge_devices.files.user_cache import CACHE_VARIABLE
from edge_runtime.calibration import cost_probe
from edge_runtime.decoding.loop import Decoding, decode
from edge_runtime.drafting.acceptance_model import AcceptanceModel
from edge_runtime.drafting.cost_model import CostCurve, MeasuredCosts
from edge_runtime.drafting.policies import Fixed
from edge_runtime.drafting.profit_policy import Profit
from edge_runtime.session.open import open_session

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
    replay = replayed.Replay.of(Fixed(length), [text], CostCurve(COSTS))
    spent = sum(one.drafted * COSTS.step + COSTS.verify[one.drafted] for one in rounds)
    # Kernels for different numbers of rows may part at a near-tie.
    assert replay.rate("code") == pytest.approx(40 / spent, rel=0.05)


def test_nobody_beats_the_one_who_knows(recorded: Path) -> None:
    (text,) = replayed.read_texts(recorded)
    bound = len(text.places) / replayed.clairvoyant(text, CostCurve(COSTS))
    policies = [Fixed(n) for n in range(13)] + [Profit(CostCurve(COSTS), AcceptanceModel())]
    rates = [replayed.Replay.of(policy, [text], CostCurve(COSTS)).rate("code") for policy in policies]
    assert max(rates) <= bound * (1 + 1e-9)
    assert rates[-1] > rates[0]


def test_the_table_has_a_row_for_every_policy(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    cost_probe.COSTS.keep("a machine", COSTS, print)
    result = CliRunner().invoke(replayed.main, ["replay", str(recorded), "--costs", str(tmp_path / "measured.json"), "--longest", "4"])
    assert result.exit_code == 0, result.output
    for name in ("a machine", "fixed 1", "fixed 4", "profit", "clairvoyant", "code"):
        assert name in result.output
