"""The backend of a bundle of both formats: measured once per machine, bundle and settings, by the rate of the policy's best rounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_devices.files.user_cache import CACHE_VARIABLE
from edge_runtime.backends.kernels.loader import VARIABLE, variant
from edge_runtime.backends.selection import BackendKind, BackendRates, cached_choices, measured_rates
from edge_runtime.bundle.manifest import SCHEMA_VERSION, BundleFile
from edge_runtime.drafting.acceptance_model import PositionModel
from edge_runtime.drafting.cost_model import MAX_ROWS, CostCurve, MeasuredCosts
from edge_runtime.drafting.profit_policy import expected_rate
from edge_runtime.errors import BackendError
from edge_runtime.session import open as opening
from edge_runtime.session.open import faster_backend
from scripted import MANIFEST


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


class Machine:
    """Rates of both backends; counts how often one is measured."""

    def __init__(self, **rates: float) -> None:
        self.rates, self.asked = rates, []
        self.notes: list[str] = []

    def rate(self, kind: BackendKind) -> float:
        self.asked.append(kind)
        if kind not in self.rates:
            raise BackendError(f"no {kind}")
        return self.rates[kind]

    def choose(self, *facts: object, kinds: tuple[BackendKind, ...] = ("llama", "onnx")) -> BackendRates:
        return measured_rates("pair", facts, kinds, self.rate, self.notes.append)


def test_the_faster_one_is_taken_and_measured_once() -> None:
    machine = Machine(llama=50.0, onnx=75.0)
    assert machine.choose("hash").fastest == "onnx"
    assert machine.notes[-1] == "Backend: ONNX Runtime, 1.50 times the speed of llama.cpp; --backend takes the other one."
    assert machine.choose("hash").fastest == "onnx"
    assert machine.asked == ["llama", "onnx"]
    assert [item.rates for item in cached_choices()] == [{"llama": 50.0, "onnx": 75.0}]


def test_another_bundle_other_settings_and_other_kernels_are_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(llama=80.0, onnx=75.0)
    assert machine.choose("hash", 2).fastest == "llama"
    for facts in (("other", 2), ("hash", 4)):
        machine.choose(*facts)
    monkeypatch.setenv(VARIABLE, "none")
    machine.choose("hash", 2)
    assert len(machine.asked) in (6, 8)  # no kernels are built everywhere


def test_a_backend_that_does_not_open_the_bundle_is_left_out() -> None:
    machine = Machine(onnx=75.0)
    assert machine.choose("hash").fastest == "onnx"
    assert "llama.cpp is left out: no llama." in machine.notes
    with pytest.raises(BackendError, match="no llama"):
        Machine().choose("other")


@pytest.mark.parametrize("rates", [{}, {"vllm": 1.0}, {"onnx": 0.0}, {"onnx": float("nan")}])
def test_rates_that_cannot_be_are_refused(rates: dict[BackendKind, float]) -> None:
    with pytest.raises(ValueError, match="are not rates of backends"):
        BackendRates(bundle="x", rates=rates)


def test_the_rate_is_that_of_the_best_round() -> None:
    model = PositionModel(0.5)
    chance = float(model.forecast(1).accept_prob[0])
    costs = CostCurve(MeasuredCosts(verify=(1.0, 4.0, *[1.5] * (MAX_ROWS - 2)), step=0.1, overhead=0.0))
    # Two rows cost more than three, so that a draft of one is verified with a padding row.
    assert np.isclose(expected_rate(costs, model, [0, 1, 2]), max(1.0, (1 + chance) / 1.6, (1 + chance + chance**2) / 1.7), rtol=0.05)
    assert expected_rate(costs, model, [0]) == 1.0


def bundle_of_both(folder: Path, gguf: int = 1, onnx: int = 1) -> Path:
    """A bundle of both formats whose targets have so many megabytes, of holes."""
    sizes = {
        ("target", "gguf"): gguf,
        ("drafter", "gguf"): 3,
        ("target", "onnx"): 0,
        ("target_data", "onnx_data"): onnx,
        ("drafter", "onnx"): 3,
    }
    files = []
    for (role, format), size in sizes.items():
        files.append(BundleFile(path=f"{role}.{format}", role=role, format=format, bytes=1_000_000 * size, sha256="0" * 64))
        with (folder / files[-1].path).open("wb") as file:
            file.truncate(files[-1].bytes)
    (folder / "manifest.json").write_text(replace(MANIFEST, schema_version=SCHEMA_VERSION, files=tuple(files)).to_json())
    return folder


@pytest.mark.parametrize(
    ("gguf", "onnx", "kernels", "chosen"),
    [(260, 240, True, "onnx"), (240, 260, True, "llama"), (240, 260, False, "onnx"), (240, 600, False, "llama")],
)
def test_until_both_were_measured_sizes_and_kernels_decide(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gguf: int, onnx: int, kernels: bool, chosen: str
) -> None:
    pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
    pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
    if not kernels:
        monkeypatch.setenv(VARIABLE, "none")
    elif variant() is None:
        pytest.skip("the row kernels were not built: pip install -e . builds them")
    assert faster_backend(bundle_of_both(tmp_path, gguf, onnx), check="none") == chosen


def test_what_was_measured_decides_for_the_same_files_and_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, facts = bundle_of_both(tmp_path), list[object]()
    monkeypatch.setattr(opening, "fitting_backends", lambda *_: ["llama", "onnx"])
    monkeypatch.setattr(
        opening, "kept_rates", lambda kept, _: facts.append(kept) or BackendRates(bundle="both", rates={"llama": 2, "onnx": 1})
    )
    for device in (None, "cpu", "gpu"):
        assert faster_backend(folder, device=device, check="none") == "llama"
    plain, on_cpu, on_gpu = facts
    assert plain[0] == "0" * 64
    assert on_cpu == plain
    assert on_gpu == [*plain, "gpu"]
