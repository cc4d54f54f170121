"""Tries what onnxruntime's WebGPU plug-in did wrong, one small graph for each, beside onnxruntime's CPU provider.

    python scripts/checks/check_webgpu_defects.py --output defects.json

Needs onnx, onnxruntime, onnxruntime-ep-webgpu, numpy and click alone, so that it can go into a report to the plug-in's authors. Each case
runs in a process of its own, since one of them ends it. Controls are what the plug-in did right beside it. A driver by software needs
ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1. The exit code is 0 whatever is found, 1 without a device.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

# Largest difference that is rounding, of values of about 1.
ROUNDING = 1e-3
SECONDS = 300
Arrays = dict[str, np.ndarray[Any, Any]]
TYPES = {np.dtype("float32"): TensorProto.FLOAT, np.dtype("int32"): TensorProto.INT32, np.dtype("int64"): TensorProto.INT64}


def attention(*, queries: int, new: int, past: int, window: int = -1, dim: int = 64, positions: int | None = None) -> float:
    """GroupQueryAttention of 4 heads to buffers of 128 rows, of which `past` are filled; rotated from `positions` on, if given."""
    heads, rows, random = 4, 128, np.random.default_rng(1)
    names = ["query", "key", "value", "past_key", "past_value", "last_row", "rows"]
    shapes = [(1, queries, heads * dim), (1, new, dim), (1, new, dim), (1, 1, rows, dim), (1, 1, rows, dim)]
    inputs: Arrays = {name: random.standard_normal(shape).astype(np.float32) for name, shape in zip(names, shapes, strict=False)}
    for name in ("past_key", "past_value"):
        inputs[name][:, :, past:] = 0
    inputs |= {"last_row": np.array([past + new - 1], np.int32), "rows": np.array(past + new, np.int32)}
    extra: dict[str, Any] = {"local_window_size": window}
    if positions is not None:
        angles = np.arange(rows)[:, None] / 100 ** (np.arange(dim // 2) / (dim // 2))
        inputs |= {"cosine": np.cos(angles).astype(np.float32), "sine": np.sin(angles).astype(np.float32)}
        inputs["positions"] = np.arange(positions, positions + queries)[None]
        extra["do_rotary"] = 1
    node = helper.make_node(
        "GroupQueryAttention",
        list(inputs),
        ["out", "present_key", "present_value"],
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=1,
        scale=1.0 / dim**0.5,
        **extra,
    )
    return difference([node], inputs, "out")


def difference(nodes: list[Any], inputs: Arrays, output: str) -> float:
    """The largest difference between the device's output and the CPU provider's."""
    infos = [helper.make_tensor_value_info(name, TYPES[array.dtype], array.shape) for name, array in inputs.items()]
    graph = helper.make_graph(nodes, "case", infos, [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    expected = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run([output], inputs)[0]
    options = ort.SessionOptions()
    options.add_provider_for_devices(devices()[:1], {})
    session = ort.InferenceSession(model, options)
    given = session.run([output], inputs)[0]
    return float(np.abs(np.nan_to_num(given, nan=np.inf) - expected).max(initial=0.0))


def devices() -> list[Any]:
    """The plug-in's devices."""
    webgpu = import_module("onnxruntime_ep_webgpu")
    if webgpu.get_ep_name() not in [device.ep_name for device in ort.get_ep_devices()]:
        ort.register_execution_provider_library("webgpu", webgpu.get_library_path())
    return [device for device in ort.get_ep_devices() if device.ep_name == webgpu.get_ep_name()]


def product_over_nothing() -> float:
    """The product [4, 0] x [0, 64], as that of attention's shares with the K/V rows before the first prompt: zeros."""
    inputs = {"shares": np.zeros((1, 1, 4, 0), np.float32), "rows": np.zeros((1, 1, 0, 64), np.float32)}
    return difference([helper.make_node("MatMul", list(inputs), ["out"])], inputs, "out")


CASES: dict[str, Callable[[], float]] = {
    "MatMul [4, 0] x [0, 64]": product_over_nothing,
    "attention without new rows, no window (control)": lambda: attention(queries=4, new=0, past=60),
    "attention with a window of 16 and new rows (control)": lambda: attention(queries=4, new=4, past=60, window=16),
    "attention with a window of 16, without new rows": lambda: attention(queries=4, new=0, past=60, window=16),
    "attention of 31 queries (control)": lambda: attention(queries=31, new=31, past=20),
    "attention of 32 queries": lambda: attention(queries=32, new=32, past=20),
    "attention of 33 queries": lambda: attention(queries=33, new=33, past=20),
    "attention of 64 queries": lambda: attention(queries=64, new=64, past=20),
    "attention of 64 queries, nothing before": lambda: attention(queries=64, new=64, past=0),
    "rotation at the rows' own places (control)": lambda: attention(queries=4, new=4, past=20, positions=20),
    "rotation at position_ids that are others": lambda: attention(queries=4, new=4, past=20, positions=50),
}


def record_of(case: str) -> dict[str, Any]:
    """Runs a case in a process of its own."""
    command = [sys.executable, __file__, "--case", case]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"case": case, "outcome": "timeout"}
    if done.returncode != 0:
        error = done.stderr.strip().splitlines()[-1:] if done.returncode > 0 else []
        return {"case": case, "outcome": "ended", "exit_code": done.returncode, "error": error}
    largest = json.loads(done.stdout.splitlines()[-1])
    return {"case": case, "outcome": "right" if largest < ROUNDING else "wrong", "largest_difference": largest}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--output", type=click.Path(path_type=Path), help="Write the results here as JSON too.")
@click.option(
    "--case", "chosen", type=click.Choice(list(CASES)), metavar="NAME", help="Run this case here, and print the largest difference."
)
def main(output: Path | None, chosen: str | None) -> None:
    """Try what the WebGPU plug-in of onnxruntime does wrong, a case a process."""
    ort.set_default_logger_severity(4)
    if not devices():
        sys.exit("the plug-in finds no device")
    if chosen is not None:
        print(json.dumps(CASES[chosen]()))
        return
    versions = {name: version(name) for name in ("onnxruntime", "onnxruntime-ep-webgpu")}
    device = devices()[0].device
    facts = {**versions, "vendor": device.vendor, "device": dict(device.metadata)}
    print(json.dumps(facts))
    records = []
    for case in CASES:
        records.append(record_of(case))
        print(f"{case}: {' '.join(str(value) for value in list(records[-1].values())[1:])}", flush=True)
    if output is not None:
        output.write_text(json.dumps({**facts, "cases": records}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
