"""Encoders of images and sound beside a device: which place is taken, and that a device's rows are the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

import software_gpu
from edge_runtime.backends.onnx import encoder_place
from edge_runtime.backends.onnx.devices import PROCESSOR
from edge_runtime.backends.onnx.encoder_place import runs_on_device
from edge_runtime.backends.onnx.loader import SessionOptions
from edge_runtime.backends.onnx.media_encoder import OrtMediaEncoder
from edge_runtime.errors import BackendError
from tiny_media import picture

ROWS = np.ones((3, 4), np.float32)
NAN = np.full((3, 4), np.nan, np.float32)


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
    """That is measured once, a failure too."""
    device = replace(PROCESSOR, name="webgpu", provider="WebGpuExecutionProvider", kind="gpu")
    opened, clock = list[str](), [0.0]
    monkeypatch.setattr(encoder_place, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def rows_on(options: SessionOptions) -> Callable[[], Any]:
        opened.append(options.device.name)
        given, took = (ROWS, 0.005) if options.device.is_cpu else (rows, seconds)
        if isinstance(given, Exception):
            raise given

        def encode() -> Any:
            clock[0] += took
            return given

        return encode

    options = SessionOptions(threads=1, device=device)
    answers = [runs_on_device(Path("vision.onnx"), f"{says} {chosen}", options, "image", rows_on) for _ in range(2)]
    assert [answer[0] for answer in answers] == [chosen, chosen]
    assert says in answers[0][1]
    assert answers[1][1] == ""
    assert opened == ["cpu", "webgpu"]


def test_a_device_that_fails_later_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a larger image does not fit into its memory."""
    device = replace(PROCESSOR, name="webgpu", provider="WebGpuExecutionProvider", kind="gpu")
    sentences: list[str] = []
    encoder = OrtMediaEncoder(Path("vision.onnx"), None, SessionOptions(threads=1, device=device), 4, notify=sentences.append)

    def rows(_media: Any, graph: Any) -> Any:
        if graph.device is device:
            raise BackendError("no memory")
        return ROWS

    monkeypatch.setattr(encoder, "_rows", rows)
    monkeypatch.setattr(encoder, "_opened", lambda _kind, _path, options: SimpleNamespace(device=options.device))
    monkeypatch.setitem(encoder._graphs, "image", SimpleNamespace(device=device))
    for _ in range(2):
        assert encoder.encode(picture(48, 48, 1)) is ROWS
    assert sentences == ["The encoder of image failed on webgpu and runs on the CPU from now on: no memory."]


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
