"""Random pairs and texts on accelerators: what is an alarm, and what is none."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("onnx", reason="needs edge-mtp[export]")
pytest.importorskip("torch", reason="makes random pairs")

from click.testing import CliRunner

import check_device
from edge_runtime.errors import RequestError


@pytest.mark.parametrize(("device", "passed"), [("cuda", True), ("cpu", False)])
def test_a_kind_of_device_passes_under_its_own_name(device: str, passed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object, notify: Any, **__: object) -> Any:
        notify("cuda computes what the CPU does.")
        return nullcontext(SimpleNamespace(device=device))

    monkeypatch.setattr(check_device, "open_session", opened)
    monkeypatch.setattr(check_device, "export_pair", lambda _: None)
    monkeypatch.setattr(check_device, "write_random_pair", lambda *_: (SimpleNamespace(family="e2b"), Path("t"), Path("d")))
    record = next(check_device.pair_records("gpu", "onnx", 0))
    assert (record["passed"], record["says"]) == (passed, ["cuda computes what the CPU does."])


@pytest.mark.parametrize(("gap", "passed"), [(0.0, True), (-0.05, True), (0.2, False), (None, False)])
def test_a_tie_is_no_alarm(gap: float | None, passed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def generated(*_: object, draft_length: int | None, **__: object) -> Any:
        stats = SimpleNamespace(drafted=0, accepted=0, rounds=0)
        return SimpleNamespace(tokens=[draft_length], stats=stats, text=lambda: "")

    session = SimpleNamespace(generate=generated)
    report = SimpleNamespace(logit_gap=gap, sentence=lambda: "first divergence")
    monkeypatch.setattr(check_device, "open_session", lambda *_, **__: nullcontext(session))
    monkeypatch.setattr(check_device, "check_lossless", lambda *_: report)
    assert next(check_device.text_records("gpu", "onnx", Path("bundle"), 0))["passed"] is passed


@pytest.mark.parametrize(("runs", "code", "counted"), [(1, 0, "1 of 1 pairs"), (0, 1, "0 of 0 pairs")])
def test_what_does_not_run_on_a_device_is_no_alarm(runs: int, code: int, counted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where nothing runs, as on a device that is not there, nothing was checked."""
    opened = [nullcontext(SimpleNamespace(device="cuda"))] * runs

    def opening(*_: object, **__: object) -> Any:
        if opened:
            return opened.pop()
        raise RequestError("cuda does not run experts")

    monkeypatch.setattr(check_device, "open_session", opening)
    monkeypatch.setattr(check_device, "export_pair", lambda _: None)
    monkeypatch.setattr(check_device, "write_random_pair", lambda *_: (SimpleNamespace(family="26b-a4b"), Path("t"), Path("d")))
    result = CliRunner().invoke(check_device.main, ["--device", "cuda", "--pairs", str(runs + 2)])
    assert result.exit_code == code, result.output
    assert f"{counted} passed the check of cuda; 2 more do not run there, and it says so" in result.output
