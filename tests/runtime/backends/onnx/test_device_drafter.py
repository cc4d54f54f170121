"""The drafter on a device that keeps K/V rows: its step is the Loop's, and where it runs is measured."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
pytest.importorskip("onnx", reason="needs edge-mtp[export]")

import onnxruntime as ort

from edge_runtime.backends.onnx import drafter as drafter_module
from edge_runtime.backends.onnx.device_draft_graph import RECENT, draft_step_graph
from edge_runtime.backends.onnx.device_drafter import DeviceDrafter, DraftPlaces, timed_places
from edge_runtime.backends.onnx.devices import PROCESSOR
from edge_runtime.backends.onnx.drafter_weights import OtherGraphError
from edge_runtime.backends.onnx.loader import SessionOptions, value_over
from edge_runtime.backends.onnx.open import OrtOptions, open_onnx
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.calibration import measured
from edge_runtime.errors import BackendError, RequestError

Bundles = Callable[..., Path]
CAPACITY, LENGTH, STEPS, WINDOW = 256, 180, 4, 128
GPU = replace(PROCESSOR, name="webgpu", provider="WebGpuExecutionProvider", kind="gpu")


def inputs(seed: int) -> dict[str, Any]:
    """What both graphs read, with rows beyond the text that have to stay unread."""
    random = np.random.default_rng(seed)

    def floats(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    made: dict[str, Any] = {
        f"{word}.{layer}": floats(1, 1, CAPACITY, 64 if layer == 2 else 128) for word in ("key", "value") for layer in (2, 3)
    }
    made |= {"position_ids": np.array([[LENGTH]]), "token": np.array([[random.integers(300, 4000)]]), "hidden": floats(1, 1, 256)}
    for kind, half in (("sliding", 32), ("full", 64)):
        angles = np.arange(512)[:, None] / 1e4 ** (np.arange(half) / half)
        made |= {f"{word}_{kind}": of(angles).astype(np.float32) for word, of in (("cosine", np.cos), ("sine", np.sin))}
    return made


@pytest.mark.parametrize("weights", ["f32", "int8"])
def test_steps_draft_what_the_loop_does(onnx_pair: Bundles, weights: str) -> None:
    bundle = open_bundle(onnx_pair(weights))
    path = bundle.path("drafter", "onnx")
    model = draft_step_graph(path.read_bytes(), bundle.manifest.cache_layout.buffers)
    assert model is not None
    own = ort.SessionOptions()
    own.log_severity_level = 4
    own.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    loop, step = (ort.InferenceSession(each, own, providers=["CPUExecutionProvider"]) for each in (str(path), model))
    values, attended = inputs(1), LENGTH - WINDOW - 1
    rows = {name: array[:, :, attended if name.endswith("2") else 0 : LENGTH] for name, array in values.items() if "." in name}
    draft = {"draft_length": np.array(STEPS), "least_probability": np.array(1e-30, np.float32), "with_scores": np.array(True)}
    tokens, probabilities, scores = loop.run(["drafts", "probabilities", "scores"], {**values, **rows, **draft})
    places = np.arange(CAPACITY, dtype=np.float32).reshape(1, 1, 1, -1)
    values |= {
        "recent": np.zeros((2, 12), np.float32),
        "rows_there": np.array([LENGTH], np.float32),
        "first_attended": np.array([attended], np.float32),
    }
    values |= {"places_full": places, "places_sliding": places}
    for number in range(STEPS):
        given = dict(zip((value.name for value in step.get_outputs()), step.run(None, values), strict=True))
        assert np.sort(given["step_scores"])[-8:] == pytest.approx(np.sort(scores[number])[-8:], abs=0.3 if weights == "int8" else 1e-3)
        values |= {name.removeprefix("next_"): value for name, value in given.items() if name.startswith("next_")}
    assert values["recent"][0, -STEPS:].tolist() == tokens.tolist()
    assert values["recent"][1, -STEPS:] == pytest.approx(probabilities, abs=0.03)


def test_a_graph_of_a_stranger_is_left_to_the_cpu(onnx_pair: Bundles) -> None:
    bundle = open_bundle(onnx_pair("f32"))
    assert draft_step_graph(bundle.path("target", "onnx").read_bytes(), bundle.manifest.cache_layout.buffers) is None


class OnDevice:
    """A target on the CPU as one whose rows lie on a device."""

    def __init__(self, target: Any) -> None:
        arrays = {name: target.cache.array(name) for name in target.cache.names}
        on_device = {name: value_over(array) for name, array in arrays.items()}
        self.cache = SimpleNamespace(
            window=target.cache.window, capacity=target.cache.capacity, on_device=on_device, placed=lambda array: value_over(array.copy())
        )
        self.rotations, self.vocabulary, self.hidden_size = target.rotations, target.vocabulary, target.hidden_size
        self.closers: list[Any] = []
        self._target = target

    @property
    def length(self) -> int:
        return int(self._target.length)

    @property
    def hidden_place(self) -> tuple[int, int] | None:
        return None if self._target.hidden_row is None else (2, 1)

    def hidden_value(self, rows: int) -> Any:
        self._rows = np.repeat(self._target.hidden_row[None, None], rows, axis=1)
        self._rows[0, 0] = np.nan  # another token's
        return value_over(self._rows)


def test_a_draft_on_the_device_is_the_cpus(onnx_pair: Bundles) -> None:
    bundle = open_bundle(onnx_pair("f32"))
    target, on_cpu, _ = open_onnx(bundle, OrtOptions(context=300, threads=1), None)
    given: Any = OnDevice(target)
    with target:
        assert on_cpu is not None
        drafter = DeviceDrafter(bundle.path("drafter", "onnx"), given, SessionOptions(threads=1), bundle.manifest.cache_layout)
        assert drafter.draft(5, 3) == []
        target.prefill(np.random.default_rng(3).integers(300, 4000, 200).tolist())  # beyond the window
        for length, drafts in ((200, 12), (198, 5)):
            target.rollback(length - 2)
            target.verify([400, 500])
            assert drafter.draft(600, drafts) == on_cpu.draft(600, drafts)

        probabilities: list[float] = []

        def second(scores: Any, tokens: Any = None) -> int:
            place = int(np.argsort(scores)[-2])
            return place if tokens is None else int(tokens[place])

        def unlikely(probability: float) -> bool:
            probabilities.append(probability)
            return len(probabilities) % 5 != 0

        assert drafter.draft(600, 3, second) == on_cpu.draft(600, 3, second)
        assert drafter.draft(600, 12, None, unlikely) == on_cpu.draft(600, 12, None, unlikely)
        assert probabilities[:5] == pytest.approx(probabilities[5:], abs=1e-4)
        drafter.close()
        with pytest.raises(RequestError, match="closed"):
            drafter.draft(600, 3)


class Stub:
    """A drafter, or the target that it belongs to."""

    def __init__(self, name: str) -> None:
        self.name, self.closed, self.context, self.draft_place = name, False, 100, ""

    def close(self) -> None:
        self.closed = True

    def draft(self, *_: Any) -> list[int]:
        time.sleep(0.002 * (self.name == "cpu"))
        return []

    def prefill(self, *_: Any) -> None:
        """As a target's."""

    verify = rollback = prefill


SOONER, LATER = DraftPlaces(on_device=0.1, on_processor=0.2), DraftPlaces(on_device=0.3, on_processor=0.2)
FAILED = DraftPlaces(failure="lost")


@pytest.mark.parametrize(
    ("places", "measured", "software", "opened", "chosen"),
    [
        (SOONER, True, False, ["gpu", "cpu"], "gpu"),
        (LATER, True, False, ["gpu", "cpu"], "cpu"),
        (SOONER, False, False, ["gpu"], "gpu"),  # as the next starts know
        (LATER, False, False, ["cpu"], "cpu"),
        (FAILED, False, False, ["cpu"], "cpu"),
        (SOONER, True, True, ["cpu"], "cpu"),
    ],
)
def test_it_drafts_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, places: DraftPlaces, *, measured: bool, software: bool, opened: list[str], chosen: str
) -> None:
    """What is known opens no other place."""
    there, target = placed(monkeypatch), Stub("target")

    def timed(_target: Any, *openers: Callable[[], Any]) -> DraftPlaces:
        for opener in openers[:2] if measured else ():
            opener()
        return places

    monkeypatch.setattr(drafter_module, "timed_places", timed)
    assert fastest(target, software=software).name == chosen
    assert list(there) == opened
    assert [stub.name for stub in there.values() if not stub.closed] == [chosen]
    assert target.draft_place == ("" if software else places.sentence("webgpu"))


def test_a_drafter_that_does_not_run_on_the_device_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def lost(*_: Any) -> None:
        tried.append("gpu")
        raise BackendError("it is lost")

    placed(monkeypatch)
    monkeypatch.setattr(drafter_module, "DeviceDrafter", lost)
    targets = [Stub("target") for _ in range(2)]
    assert [fastest(target).name for target in targets] == ["cpu", "cpu"]
    assert tried == ["gpu"]
    assert {target.draft_place for target in targets} == {
        "drafts are made on the CPU, since the drafter does not run on webgpu: it is lost"
    }


def test_one_that_no_longer_runs_there_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that was faster when it was measured may fail to open later, as where memory is missing."""
    placed(monkeypatch)
    assert fastest(Stub("target"), "later").name == "gpu"
    fails = [OtherGraphError()]

    def lost(*_: Any) -> None:
        raise fails.pop()

    monkeypatch.setattr(drafter_module, "DeviceDrafter", lost)
    assert [fastest(Stub("target"), "later").name for _ in range(2)] == ["cpu", "cpu"]
    assert not fails


@pytest.mark.parametrize(
    ("error", "known", "later"), [(BackendError, False, "gpu"), (BackendError, True, "gpu"), (OtherGraphError, True, "cpu")]
)
def test_a_device_without_memory_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], *, known: bool, later: str
) -> None:
    """What follows from the graph is kept for good."""
    now, name, quiet = [1e9], f"{error.__name__} {known}", SimpleNamespace(is_busy=False)
    monkeypatch.setattr(measured, "time", SimpleNamespace(time=lambda: now[0]))
    monkeypatch.setattr(measured, "load_now", lambda: quiet)
    monkeypatch.setattr(measured, "LoadWatch", lambda: SimpleNamespace(load=lambda: quiet))
    placed(monkeypatch)
    if known:
        assert fastest(Stub("target"), name).name == "gpu"

    def lost(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(drafter_module, "DeviceDrafter", lost)
        assert fastest(Stub("target"), name).name == "cpu"
    assert fastest(Stub("target"), name).name == "cpu"
    now[0] += 1.1 * measured.RETRY_SECONDS
    assert fastest(Stub("target"), name).name == later


def test_a_target_that_fails_by_itself_says_nothing_of_the_drafter() -> None:
    """But a context that is shorter than what is timed does."""
    errors: list[Exception] = [BackendError("the device is lost"), RequestError("context 32 is full")]

    def verify(*_: Any) -> None:
        raise errors.pop(0)

    target: Any = SimpleNamespace(**dict.fromkeys(("rollback", "prefill"), lambda *_: None), verify=verify)
    openers = (pytest.fail, pytest.fail)
    with pytest.raises(BackendError, match="the device is lost"):
        timed_places(target, *openers, "a target that fails")
    assert timed_places(target, *openers, "a target that fails") == DraftPlaces(failure="context 32 is full")


def placed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Stub]:
    """Stubs of both places, which appear when they are opened; the device's drafts take less time."""
    there: dict[str, Stub] = {}

    def made(name: str) -> Callable[..., Stub]:
        return lambda *_, **__: there.setdefault(name, Stub(name))

    monkeypatch.setattr(drafter_module, "DeviceDrafter", made("gpu"))
    monkeypatch.setattr(drafter_module, "_drafter_on_processor", made("cpu"))
    return there


def fastest(target: Any, identity: str = "abc", *, software: bool = False) -> Any:
    files: Any = SimpleNamespace(identity=identity, layout=None)
    session = SessionOptions(threads=1, device=replace(GPU, software=software))
    return drafter_module._fastest_drafter(Path("drafter.onnx"), target, session, files)


def test_both_places_are_timed_once() -> None:
    target: Any = SimpleNamespace(**dict.fromkeys(("rollback", "prefill", "verify"), lambda *_: None))
    opened: list[str] = []

    def place(name: str, seconds: float) -> Callable[[], Any]:
        def opener() -> Any:
            opened.append(name)
            return SimpleNamespace(draft=lambda *_: time.sleep(seconds))

        return opener

    places = [timed_places(target, place("gpu", 0.002), place("cpu", 0), "a pair on a device") for _ in range(2)]
    assert places[0] == places[1]
    assert not places[0].device_is_faster
    assert opened == ["gpu", "cpu"]
    assert re.fullmatch(
        r"drafts are made on the CPU: a draft of 3 takes [2-9]\.\d\d ms on npu and 0\.\d\d ms on the CPU", places[0].sentence("npu")
    )


@pytest.mark.parametrize("token", [np.nan, np.inf, -1.0, 100.0])
def test_tokens_that_there_are_none_of_are_refused(token: float) -> None:
    recent = np.zeros((2, 12), np.float32)
    recent[0, -2] = token
    drafter = object.__new__(DeviceDrafter)
    drafter._places = [{RECENT: value_over(recent)}] * 2
    drafter._target = SimpleNamespace(vocabulary=SimpleNamespace(size=100))
    assert drafter._recent(4, 1) == [(0, 0.0)]
    with pytest.raises(BackendError, match="tokens that there are none of"):
        drafter._recent(4, 2)
