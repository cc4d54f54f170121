"""What was measured on a busy machine is used and not kept, and what is known is not measured again there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_devices.machine.load import MachineLoad
from edge_runtime.calibration import backend_choice, crash_probe, first_use, quiet
from edge_runtime.calibration.cost_probe import MeasuredCosts

COSTS = MeasuredCosts(verify=tuple(0.01 * n for n in range(1, 14)), step=0.001, overhead=0.0)
BUSY = MachineLoad(others=0.5, seconds=2.0)
QUIET = MachineLoad(others=0.0, seconds=2.0, waiting=0.05)
WAITING = MachineLoad(others=0.06, seconds=2.0, waiting=0.8)
UNKNOWN = MachineLoad(others=None, seconds=2.0)
NOTHING: Any = None
PAIR = first_use.MeasuredPair(target=NOTHING, drafter=None, token=0, rows=13, objective="time", slowdown=None, facts=("a",))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[MachineLoad, MachineLoad], None]:
    """Sets the load before and during measurements; the cache is empty."""
    monkeypatch.setenv("EDGE_MTP_CACHE", str(tmp_path))

    def use(before: MachineLoad, meanwhile: MachineLoad) -> None:
        monkeypatch.setattr(quiet, "load_now", lambda: before)
        for module in (quiet, crash_probe):
            monkeypatch.setattr(module, "LoadWatch", lambda: SimpleNamespace(load=lambda: meanwhile))

    return use


@pytest.mark.parametrize(
    ("before", "meanwhile", "words"),
    [
        (BUSY, QUIET, "This machine is busy, so what is measured on first use is used once and not kept (other programs used 50% of the"),
        (
            QUIET,
            WAITING,
            "Other programs disturbed the measurement of the costs of drafts, which are used once and not kept (other programs used 6%",
        ),
        (QUIET, QUIET, None),
        (UNKNOWN, UNKNOWN, None),
    ],
)
def test_costs_of_a_busy_machine_are_not_kept(before, meanwhile, words, loads, monkeypatch, tmp_path) -> None:
    loads(before, meanwhile)
    monkeypatch.setattr(first_use, "measure_costs", lambda *_, **__: COSTS)
    said: list[str] = []
    assert first_use.measured_costs(PAIR, None, said.append) is not None
    kept = tmp_path / "costs.json"
    if words is None:
        assert len(json.loads(kept.read_text())) >= 1
        assert said == []
    else:
        assert not kept.exists()
        assert len(said) == 1
        assert said[0].startswith(words)


def test_known_costs_are_not_measured_again_while_the_machine_is_busy(loads, monkeypatch) -> None:
    measured: list[int] = []
    monkeypatch.setattr(first_use, "measure_costs", lambda *_, **__: measured.append(1) or COSTS)
    for before, count in ((QUIET, 1), (BUSY, 1), (QUIET, 2), (QUIET, 3), (QUIET, 3)):  # three quiet uses are enough
        loads(before, QUIET)
        first_use.measured_costs(PAIR, None, lambda _: None)
        assert len(measured) == count


def test_a_busy_machine_is_said_once_though_its_load_changes() -> None:
    said: list[str] = []
    notify = quiet.said_once(said.append)
    for sentence in ("It is busy (50% used).", "First use.", "It is busy (60% used).", "First use.", "It is not (70% used)."):
        notify(sentence)
    assert said == ["It is busy (50% used).", "First use.", "It is not (70% used)."]


def test_the_wait_has_a_title_and_an_end(loads, monkeypatch) -> None:
    loads(QUIET, QUIET)
    monkeypatch.setattr(first_use, "measure_costs", lambda *_, report, **__: report(0.5) or COSTS)
    shown: list[object] = []

    class Wait:
        def __init__(self, title: str) -> None:
            shown.append(title)

        def __enter__(self) -> Callable[..., None]:
            return shown.append

        def __exit__(self, *_: object) -> None:
            shown.append("end")

    first_use.measured_costs(PAIR, None, lambda _: None, waiting=Wait)
    assert shown == ["measuring what drafts cost on this machine", 0.5, "end"]


def test_the_backend_that_was_faster_on_a_busy_machine_is_not_kept(loads) -> None:
    said: list[str] = []
    for meanwhile, rates in ((BUSY, {"llama": 2.0, "onnx": 1.0}), (QUIET, {"llama": 1.0, "onnx": 2.0})):
        loads(QUIET, meanwhile)
        found = backend_choice.measured_rates("pair", ["a"], ["llama", "onnx"], rates.__getitem__, said.append)
        assert found.rates == rates
    assert any("disturbed the measurement of the backends' speeds" in text for text in said)
    assert [one.rates for one in backend_choice.cached_choices()] == [{"llama": 1.0, "onnx": 2.0}]


@pytest.mark.parametrize("load", [BUSY, QUIET])
def test_a_late_child_says_something_on_a_quiet_machine_only(load: MachineLoad, loads, monkeypatch) -> None:
    pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
    loads(QUIET, load)
    ends = iter([("gave no answer in 120 seconds", True), (None, False)])
    monkeypatch.setattr(crash_probe, "_run", lambda *_: next(ends))
    said: list[str] = []
    answer = crash_probe.probe_load_options(Path("target.gguf"), None, ["Q4_0"], notify=said.append)
    assert not answer.use_extra_bufts
    assert bool(crash_probe.cached_probes()) is (load is QUIET)
    assert any("tried again next time" in text for text in said) is (load is BUSY)
    monkeypatch.setattr(crash_probe, "_run", lambda *_: ("gave no answer in 120 seconds", True))
    with pytest.raises(crash_probe.BackendError, match="close other programs" if load is BUSY else "CMAKE_ARGS"):
        crash_probe.probe_load_options(Path("target.gguf"), None, ["Q8_0"], notify=said.append)
