"""Encoders of images and sound beside a device: which place is taken, and that a device's rows are the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

import software_gpu
from edge_runtime.backends.onnx import encoder_place, media_encoder
from edge_runtime.backends.onnx import open as open_module
from edge_runtime.backends.onnx.devices import PROCESSOR
from edge_runtime.backends.onnx.encoder_place import device_encoder, runs_on_device
from edge_runtime.backends.onnx.loader import SessionOptions
from edge_runtime.backends.onnx.media_encoder import OrtMediaEncoder
from edge_runtime.backends.onnx.open import OrtOptions
from edge_runtime.bundle.onnx_file import Node
from edge_runtime.calibration import measured
from edge_runtime.errors import BackendError
from tiny_media import picture

ROWS = np.ones((3, 4), np.float32)
NAN = np.full((3, 4), np.nan, np.float32)
GPU = replace(PROCESSOR, name="webgpu", provider="WebGpuExecutionProvider", kind="gpu")


@pytest.mark.parametrize(
    ("rows", "seconds", "chosen", "says"),
    [
        (1.0005 * ROWS, 0.001, True, "tried on webgpu: 0.001 s there, 0.005 s on the CPU, 0.0005 apart"),
        (1.002 * ROWS, 0.001, False, "runs on the CPU: rows of webgpu are 0.002 off, at most 0.001 is allowed"),
        (ROWS, 0.01, False, "the faster one is taken"),
        (NAN, 0.001, False, "does not run on webgpu: its rows hold NaN"),
        (BackendError("no such operator"), 0.001, False, "does not run on webgpu: no such operator"),
    ],
)
def test_a_device_is_taken_if_its_rows_are_right_and_sooner(
    monkeypatch: pytest.MonkeyPatch, rows: Any, seconds: float, *, chosen: bool, says: str
) -> None:
    """That is measured once, a failure too; the first run on each takes longer, and does not count."""
    opened, clock = list[str](), [0.0]
    monkeypatch.setattr(encoder_place, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def rows_on(options: SessionOptions) -> Callable[[], Any]:
        opened.append(options.device.name)
        given, took = (ROWS, 0.005) if options.device.is_cpu else (rows, seconds)
        if isinstance(given, Exception):
            raise given

        runs = count()

        def encode() -> Any:
            clock[0] += took if next(runs) else 1.0
            return given

        return encode

    options = SessionOptions(threads=1, device=GPU)
    answers = [runs_on_device(Path("vision.onnx"), f"{says} {chosen}", options, "image", rows_on) for _ in range(2)]
    assert [answer[0] for answer in answers] == [chosen, chosen]
    assert says in answers[0][1]
    assert answers[1][1] == ""
    assert opened == ["cpu", "webgpu"]


@pytest.mark.parametrize(("error", "tries"), [(BackendError("no memory"), 2), (None, 1)])
def test_a_device_without_memory_is_tried_again_later(monkeypatch: pytest.MonkeyPatch, error: BackendError | None, tries: int) -> None:
    now, opened = [1e9], list[str]()
    monkeypatch.setattr(measured, "time", SimpleNamespace(time=lambda: now[0]))
    monkeypatch.setattr(measured, "load_now", lambda: SimpleNamespace(is_busy=False))

    def rows_on(options: SessionOptions) -> Callable[[], Any]:
        opened.append(options.device.name)
        if error is not None and not options.device.is_cpu:
            raise error
        return lambda: ROWS if options.device.is_cpu else NAN

    for _ in range(4):
        runs_on_device(Path("vision.onnx"), f"tried {tries}", SessionOptions(threads=1, device=GPU), "image", rows_on)
        now[0] += 0.51 * measured.RETRY_SECONDS
    assert opened.count("webgpu") == tries


def failing(monkeypatch: pytest.MonkeyPatch, encoder: OrtMediaEncoder, *, opening: bool) -> None:
    """Has the encoder's device fail, when its graph is opened or later."""

    def rows(_media: Any, graph: Any) -> Any:
        if graph.device is GPU:
            raise BackendError("no memory")
        return ROWS

    def opened(_kind: str, _path: Path, options: SessionOptions) -> Any:
        if opening and options.device is GPU:
            raise BackendError("no memory")
        return SimpleNamespace(device=options.device)

    monkeypatch.setattr(encoder, "_rows", rows)
    monkeypatch.setattr(encoder, "_opened", opened)
    monkeypatch.setattr(media_encoder, "check_onnx", lambda _: None)


@pytest.mark.parametrize("opening", [True, False])
def test_a_device_that_fails_later_is_left(monkeypatch: pytest.MonkeyPatch, *, opening: bool) -> None:
    """As where its memory is taken by others, or a larger image does not fit into it."""
    sentences: list[str] = []
    encoder = OrtMediaEncoder(Path("vision.onnx"), None, SessionOptions(threads=1, device=GPU), 4, notify=sentences.append)
    failing(monkeypatch, encoder, opening=opening)
    monkeypatch.setattr(media_encoder, "runs_on_device", lambda *_: (True, ""))
    for _ in range(2):
        assert encoder.encode(picture(48, 48, 1)) is ROWS
    assert sentences == ["The encoder of image failed on webgpu and runs on the CPU from now on: no memory."]


def test_a_sample_without_memory_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's image is smaller, and encoded on the CPU."""
    sentences: list[str] = []
    file = SimpleNamespace(sha256="unadmitted", role="vision_encoder", bytes=1000, quantization=None)
    manifest = SimpleNamespace(files=[file], architecture=SimpleNamespace(hidden_size=4), media=SimpleNamespace(vision=None))
    bundle: Any = SimpleNamespace(manifest=manifest, path=lambda *_: Path("vision.onnx"), has=lambda *_: False)
    monkeypatch.setattr(open_module, "available_memory_bytes", lambda: 999)
    encoder = open_module.media_encoder(bundle, OrtOptions(context=64, threads=1, device=GPU), sentences.append)
    failing(monkeypatch, encoder, opening=True)
    assert encoder.encode(picture(48, 48, 1)) is ROWS
    assert sentences == []
    monkeypatch.setattr(open_module, "available_memory_bytes", lambda: 1000)
    encoder.close()
    encoder.encode(picture(48, 48, 1))
    assert sentences == ["The encoder of image runs on the CPU, since it does not run on webgpu: no memory."]


def test_a_product_of_a_stranger_is_refused_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = SimpleNamespace(nodes=[Node("FusedMatMul", [b"x"], [b"y"])], constants={}, added=[])
    monkeypatch.setattr(encoder_place, "read_part", lambda *_: b"")
    monkeypatch.setattr(encoder_place, "read_graph", lambda _: graph)
    with pytest.raises(BackendError, match=r"vision\.onnx has products with other inputs"):
        device_encoder(Path("vision.onnx"), SessionOptions(threads=1, device=GPU))


_ENCODED = """
import json, sys
from dataclasses import replace
from itertools import cycle
import numpy as np
from edge_runtime.backends.onnx import encoder_place, media_encoder
from edge_runtime.backends.onnx.devices import device_named
from edge_runtime.backends.onnx.open import OrtOptions, media_encoder as opened
from edge_runtime.bundle.bundle import open_bundle
from tiny_media import noise, picture
seconds = cycle([2, 1])
encoder_place._timed = lambda encode: (encode(), next(seconds))
bundle, sentences, result, nodes = open_bundle(sys.argv[1]), [], {}, {}
device = replace(device_named("webgpu"), software=False)
for name, sample in (("right", picture(48, 144, 1)), ("wrong", picture(96, 96, 1))):  # 27 and 36 patches
    media_encoder._SAMPLES = {"image": lambda: sample, "sound": lambda: noise(1_000)}
    on_cpu = opened(bundle, OrtOptions(context=64, threads=2), sentences.append)
    on_device = opened(bundle, OrtOptions(context=64, threads=2, device=replace(device, driver=name)), sentences.append)
    for media in (picture(48, 96, 1), noise(4_000))[:2 if name == "right" else 1]:
        expected, rows = on_cpu.encode(media), on_device.encode(media)
        result[f"{name} {type(media).__name__}"] = float(np.linalg.norm(rows - expected) / np.linalg.norm(expected))
    nodes[name] = {kind: list(graph.assignments()) for kind, graph in on_device._graphs.items()}
print(json.dumps({"distances": result, "nodes": nodes, "sentences": sentences}))
"""


@pytest.mark.slow(20)
@pytest.mark.skipif(bool(software_gpu.lacking()), reason=software_gpu.lacking() or "it is there")
def test_encoders_run_on_the_device(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="makes a pair with encoders")
    from edge_export.onnx.request import OnnxRequest
    from edge_export.pipeline.export import export_pair
    from edge_export.pipeline.request import ExportRequest
    from tiny_media import write_media_assistant, write_media_member

    target, drafter = write_media_member(tmp_path / "target"), write_media_assistant(tmp_path / "drafter")
    request = ExportRequest(
        target=str(target),
        drafter=str(drafter),
        output=tmp_path / "bundle",
        gguf=False,
        onnx=OnnxRequest(target="f32", drafter="f32"),
        verify=False,
        media="f16",
    )
    export_pair(request)
    result = software_gpu.run_on_it(_ENCODED, str(tmp_path / "bundle"), folder=tmp_path)
    assert max(result["distances"].values()) < 1e-3, result
    assert result["nodes"]["right"] == {"image": ["WebGpuExecutionProvider"], "sound": ["WebGpuExecutionProvider"]}
    # Attention of 32 and more queries is wrong there, as docs/accelerators.md says, and the comparison finds it.
    assert result["nodes"]["wrong"] == {"image": ["CPUExecutionProvider"]}
    assert len(result["sentences"]) == 3
