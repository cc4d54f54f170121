"""What was measured on a busy machine is used and not kept."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_devices.machine.load import MachineLoad, load_now
from edge_runtime.calibration import backend_choice, first_use
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


def test_the_backend_that_was_faster_on_a_busy_machine_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGE_MTP_CACHE", str(tmp_path))
    shares = [0.5, 0.0]
    monkeypatch.setattr(backend_choice, "LoadWatch", lambda: SimpleNamespace(load=lambda: MachineLoad(others=shares.pop(0), seconds=2.0)))
    said: list[str] = []
    for rates in ({"llama": 2.0, "onnx": 1.0}, {"llama": 1.0, "onnx": 2.0}):
        found = backend_choice.measured_rates("pair", ["a"], ["llama", "onnx"], rates.__getitem__, said.append)
        assert found.rates == rates
    assert any("while the backends' speeds were measured" in text for text in said)
    assert [one.rates for one in backend_choice.cached_choices()] == [{"llama": 1.0, "onnx": 2.0}]


def test_the_load_now_waits_for_it() -> None:
    assert load_now(0.25).seconds >= 0.25
