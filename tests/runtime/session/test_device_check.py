"""The check of an accelerator: faults that devices have had are put between a sound target and whoever uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
pytest.importorskip("onnx", reason="needs edge-mtp[export]")

from edge_runtime.backends.interface import Accelerator, OpenRequest, SingleSequence
from edge_runtime.backends.onnx import open as onnx_backend
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.errors import BackendError
from edge_runtime.session import self_checks
from edge_runtime.session.open import open_session
from edge_runtime.session.self_checks import Answers, DeviceCheck, answers, compared, is_rounded

Bundles = Callable[..., Path]
PARITY = {"quality": {"rows": 100, "mean_kl": 0.04, "perplexity": 9.0, "reference_perplexity": 8.5, "greedy_agreement": 0.9}}
LONGEST = 13


class Faulty:
    """A target, or a drafter, of a device without faults; a subclass has one."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.rows = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def verify(self, tokens: Sequence[int]) -> Any:
        self.rows += len(tokens)
        return self.changed(self.inner.verify(tokens).copy())

    def changed(self, rows: Any) -> Any:
        return rows


class Zeros(Faulty):
    def changed(self, rows: Any) -> Any:
        return rows * 0


class RepeatsTheLast(Faulty):
    last: Any = None

    def changed(self, rows: Any) -> Any:
        last, self.last = self.last, rows
        return rows if last is None else np.resize(last, rows.shape)


class IgnoresThePrompt(Faulty):
    def prefill(self, tokens: Sequence[int], **options: Any) -> None:
        self.inner.prefill([5] * len(tokens), **options)


class LosesTheRollback(Faulty):
    def rollback(self, length: int) -> None:
        if length == 0:
            self.inner.rollback(0)

    @property
    def context(self) -> int:
        return int(self.inner.context)


class NanInAThousand(Faulty):
    def changed(self, rows: Any) -> Any:
        if self.rows // 1000 != (self.rows - len(rows)) // 1000:
            rows[0, 7] = np.nan
        return rows


class FirstRowOnly(Faulty):
    def changed(self, rows: Any) -> Any:
        return np.repeat(rows[:1], len(rows), axis=0)


class LastColumnsWrong(Faulty):
    """Beyond 8 rows, as tiles of some kernels."""

    def changed(self, rows: Any) -> Any:
        rows[8:] = rows[8:] * 0.5
        return rows


class ShortSight(Faulty):
    """Of a long text only the end counts."""

    def prefill(self, tokens: Sequence[int], **options: Any) -> None:
        visible = tokens if len(tokens) < 100 else [9] * (len(tokens) - 4) + list(tokens[-4:])
        self.inner.prefill(visible, **options)


class Noise(Faulty):
    """Cosine 0.73, as a phone's GPU had it."""

    def changed(self, rows: Any) -> Any:
        return (rows + np.random.default_rng(0).standard_normal(rows.shape) * rows.std() * 0.94).astype(np.float32)


class Fails(Faulty):
    def verify(self, tokens: Sequence[int]) -> Any:
        if len(tokens) > 4:
            raise BackendError("the device is lost")
        return self.inner.verify(tokens)


class DraftsAnything(Faulty):
    def draft(self, last: int, draft_length: int, *options: Any) -> list[int]:
        return [11] * len(self.inner.draft(last, draft_length, *options))


class SecondDraftWrong(Faulty):
    def draft(self, last: int, draft_length: int, *options: Any) -> list[int]:
        drafts: list[int] = self.inner.draft(last, draft_length, *options)
        return [11 if place == 1 else token for place, token in enumerate(drafts)]


class StaleRows(Faulty):
    """Behind a rollback, rows of other tokens are read for those of the newest ones: all rows change, by less than experts do."""

    share, stale = 0.2, False

    def rollback(self, length: int) -> None:
        self.stale = length > 0 and self.inner.length > length
        self.inner.rollback(length)

    def changed(self, rows: Any) -> Any:
        return rows * (1 - self.share) if self.stale else rows


TARGETS = (
    *(Zeros, RepeatsTheLast, IgnoresThePrompt, LosesTheRollback, NanInAThousand),
    *(FirstRowOnly, LastColumnsWrong, ShortSight, Noise, Fails),
)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine looks through as many rows as a quiet one."""
    monkeypatch.setattr(self_checks, "_SECONDS", 60.0)


@pytest.fixture(scope="module")
def pair(onnx_pair: Bundles) -> Iterator[tuple[Any, Any]]:
    options = onnx_backend.OrtOptions(context=512, threads=1)
    target, drafter, _ = onnx_backend.open_onnx(open_bundle(onnx_pair("f32")), options, None)
    with target:
        yield target, drafter


@pytest.fixture(scope="module")
def reference(pair: tuple[Any, Any]) -> Answers:
    return answers(*pair, LONGEST)


def checked(reference: Answers, target: Any, drafter: Any, *, routed: bool = False) -> DeviceCheck:
    return compared("cuda", reference, target, drafter, longest=LONGEST, parity=PARITY, routed=routed)


def test_a_sound_device_passes(pair: tuple[Any, Any], reference: Answers) -> None:
    check = checked(reference, Faulty(pair[0]), pair[1])
    assert check.passed
    assert check.same_drafts == 1
    assert check.rows >= 1000
    assert "computes what the CPU does" in check.sentence()


@pytest.mark.parametrize("fault", TARGETS, ids=lambda fault: fault.__name__)
def test_each_fault_of_a_target_is_refused(fault: type[Faulty], pair: tuple[Any, Any], reference: Answers) -> None:
    check = checked(reference, fault(pair[0]), pair[1])
    assert not check.passed
    assert "cuda" in check.sentence()


@pytest.mark.parametrize("fault", [DraftsAnything, SecondDraftWrong], ids=lambda fault: fault.__name__)
def test_a_fault_of_a_drafter_is_refused(fault: type[Faulty], pair: tuple[Any, Any], reference: Answers) -> None:
    check = checked(reference, pair[0], fault(pair[1]))
    assert not check.passed
    assert "of its drafts are the CPU's, or as likely" in check.sentence()


def test_single_rows_may_differ_more_where_rows_choose_experts(pair: tuple[Any, Any], reference: Answers) -> None:
    class OtherExperts(Faulty):
        def changed(self, rows: Any) -> Any:
            rows[-1] *= 1.08
            return rows

    assert not checked(reference, OtherExperts(pair[0]), pair[1]).passed
    check = checked(reference, OtherExperts(pair[0]), pair[1], routed=True)
    assert check.passed, check
    assert not checked(reference, LastColumnsWrong(pair[0]), pair[1], routed=True).passed


def test_stale_rows_are_refused_where_rows_choose_experts(pair: tuple[Any, Any], reference: Answers) -> None:
    check = checked(reference, StaleRows(pair[0]), pair[1], routed=True)
    assert not check.passed


@pytest.mark.parametrize(("rounded", "limit"), [(True, 0.005), (False, 1e-4)])
def test_float32_weights_that_nobody_measured_have_their_limit(
    rounded: bool, limit: float, pair: tuple[Any, Any], reference: Answers
) -> None:
    lost: Any = Fails(pair[0])
    assert compared("cuda", reference, lost, pair[1], longest=LONGEST, parity=None, rounded=rounded).limit == limit


def test_which_bundles_are_rounded(onnx_pair: Bundles) -> None:
    exact, rounded = (open_bundle(onnx_pair(kind)).manifest for kind in ("f32", "int4"))
    layout = replace(exact.cache_layout, buffers=tuple(replace(buffer, dtype="f16") for buffer in exact.cache_layout.buffers))
    assert not is_rounded(exact, "onnx")
    assert all(is_rounded(*pair) for pair in ((exact, "gguf"), (rounded, "onnx"), (replace(exact, cache_layout=layout), "onnx")))


def test_rows_that_differ_in_the_last_bit_are_mentioned(pair: tuple[Any, Any], reference: Answers) -> None:
    class Tiles(Faulty):
        def changed(self, rows: Any) -> Any:
            return np.nextafter(rows, np.float32(9)) if len(rows) > 4 else rows

    check = checked(reference, Tiles(pair[0]), pair[1])
    assert check.passed
    assert check.sentence().endswith("drafts may swap tokens there that are almost equally likely")


class FakeDevices:
    """The backend, with an accelerator "gpu" of the driver `driver`, whose targets have a fault."""

    def __init__(self, fault: type[Faulty]) -> None:
        self.fault, self.driver, self.real, self.opened = fault, "1", onnx_backend.OrtBackend.open, list[str | None]()
        self.notify: Callable[[str], None] | None = None

    def open(self, backend: Any, request: OpenRequest) -> Any:
        self.opened.append(request.device)
        self.notify = request.notify
        request.notify("1 of 3 nodes runs elsewhere.")
        pair = self.real(backend, replace(request, device=None))
        if request.device is None:
            return pair
        batch = SingleSequence(self.fault(pair.batch.targets[0]), pair.drafters[0])  # type: ignore[arg-type]
        return replace(pair, batch=batch, accelerator=Accelerator(name="fake", driver=self.driver))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[type[Faulty]], FakeDevices]:
    monkeypatch.setenv("EDGE_MTP_CACHE", str(tmp_path))

    def install(fault: type[Faulty]) -> FakeDevices:
        devices = FakeDevices(fault)
        monkeypatch.setattr(onnx_backend.OrtBackend, "open", lambda backend, request: devices.open(backend, request))
        monkeypatch.setattr(onnx_backend.OrtBackend, "missing_device", lambda *_: None)
        return devices

    return install


def test_what_passed_is_kept_until_the_driver_changes(
    fake: Callable[..., FakeDevices], onnx_pair: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_checks, "_ROWS", 100)
    devices, sentences = fake(Faulty), list[str]()
    for driver, opened in (("1", ["gpu", None, "gpu"]), ("1", ["gpu"]), ("2", ["gpu", None, "gpu"])):
        devices.driver, devices.opened = driver, []
        with open_session(onnx_pair("f32"), device="gpu", context=256, threads=1, notify=sentences.append) as session:
            assert session.device == "fake"
            devices.notify(f"An encoder was tried with driver {driver}.")  # what is opened after the comparison has a say later
        assert devices.opened == opened
    assert sum("fake computes what the CPU does" in sentence for sentence in sentences) == 1 + 1
    assert [sentences.count(each) for each in ("1 of 3 nodes runs elsewhere.", "An encoder was tried with driver 2.")] == [3, 1]


def test_a_faulty_kind_falls_to_the_cpu_and_a_faulty_name_ends(fake: Callable[..., FakeDevices], onnx_pair: Bundles) -> None:
    fake(Zeros)
    sentences = list[str]()
    with open_session(onnx_pair("f32"), device="gpu", context=256, threads=1, notify=sentences.append) as session:
        assert session.device == "cpu"
        assert session.generate("def area(r):", max_tokens=4).text()
    assert next(sentence for sentence in sentences if "fake" in sentence).endswith("so this runs on the CPU.")
    with pytest.raises(BackendError, match=r"fake computes something else than the CPU: KL .*, in .*; leave --device out"):
        open_session(onnx_pair("f32"), device="cuda", context=256, threads=1)
