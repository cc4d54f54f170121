"""Counts of a shipped pair's drafts are those that ship with it, but for the number of texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from count_drafts import main
from edge_export.checkpoint.sources import reference_pair, shipped_acceptance
from edge_runtime.drafting.acceptance_model import AcceptanceModel


def test_confident_drafts_are_accepted_as_often_as_the_shipped_counts_say(exported_pair: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [str(exported_pair), "-o", str(tmp_path / "counts"), "--most", "2"])
    assert result.exit_code == 0, result.output
    models = [
        AcceptanceModel.from_json(counts)
        for counts in (json.loads((tmp_path / "counts").read_text()), shipped_acceptance(reference_pair()[1]))
    ]
    made, shipped = (model.forecast(8).accept_prob for model in models if model)
    assert made[-1] == pytest.approx(shipped[-1], abs=0.1)
    assert made[-1] > made[0]
