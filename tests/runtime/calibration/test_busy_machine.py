"""What was measured on a busy machine is used and not kept."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_devices.machine.load import MachineLoad, load_now
from edge_runtime.calibration import first_use
from edge_runtime.calibration.cost_probe import MeasuredCosts

COSTS = MeasuredCosts(verify=tuple(0.01 * n for n in range(1, 14)), step=0.001, overhead=0.0)


@pytest.mark.parametrize("share", [0.0, 0.5, None])
def test_costs_of_a_busy_machine_are_not_kept(share: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGE_MTP_CACHE", str(tmp_path))
    monkeypatch.setattr(first_use, "LoadWatch", lambda: SimpleNamespace(load=lambda: MachineLoad(others=share, seconds=2.0)))
    monkeypatch.setattr(first_use, "measure_costs", lambda *_, **__: COSTS)
    said: list[str] = []
    unused: Any = None
    pair = first_use.MeasuredPair(target=unused, drafter=None, token=0, rows=13, objective="time", slowdown=None, facts=("a",))
    assert first_use.measured_costs(pair, None, said.append) is not None
    kept = tmp_path / "costs.json"
    if share == 0.5:
        assert not kept.exists()
        assert "Other programs used 50% of the processors while the costs of drafts were measured" in said[0]
    else:
        assert len(json.loads(kept.read_text())) >= 1
        assert said == []


def test_the_load_now_waits_for_it() -> None:
    assert load_now(0.25).seconds >= 0.25
