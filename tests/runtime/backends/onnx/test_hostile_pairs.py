"""Bundles whose hashes are right and whose parts do not fit together: refused in a sentence, or run on what is there."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

from changed_bundle import nodes_of, with_graphs
from edge_runtime.backends.kernels.loader import address_of, variant
from edge_runtime.backends.onnx import drafter
from edge_runtime.backends.onnx.drafter import KernelDrafter, OtherGraphError, load_draft, read_weights
from edge_runtime.backends.onnx.kv_cache import rotary_tables
from edge_runtime.backends.onnx.open import OrtOptions, open_onnx, open_pair
from edge_runtime.backends.onnx.target import OrtTarget, pair_of
from edge_runtime.bundle.bundle import Bundle, open_bundle
from edge_runtime.bundle.manifest import Rotation
from edge_runtime.errors import BackendError, EdgeRuntimeError

Bundles = Callable[..., Path]
OPTIONS = OrtOptions(context=256, threads=1)
kernels = pytest.mark.skipif(variant() is None, reason="the row kernels were not built: pip install -e . builds them")


@pytest.mark.parametrize(
    ("array", "kind", "size"),
    [
        (np.zeros(8, np.uint8), np.float32, 8),
        (np.zeros(8, np.float64), np.float32, 8),
        (np.zeros(8, ">f4"), np.float32, 8),
        (np.zeros(7, np.float32), np.float32, 8),
        (np.zeros(9, np.float32), np.float32, 8),
        (np.zeros(16, np.float32)[::2], np.float32, 8),
        (np.zeros((4, 2), np.float32).T, np.float32, 8),
        (np.zeros(33, np.uint8)[1:].view(np.float32), np.float32, 8),
    ],
    ids=["another type", "a wider one", "another order of bytes", "too few", "too many", "every other", "turned", "not aligned"],
)
def test_an_array_that_is_not_what_native_code_reads_is_refused(array: Any, kind: Any, size: int) -> None:
    with pytest.raises(ValueError, match="in the place of 8 float32"):
        address_of(array, kind, size)


def test_an_array_that_is_what_native_code_reads_is_handed_over() -> None:
    array = np.zeros((4, 2), np.float32)
    assert address_of(array, np.float32, 8) == address_of(array, np.float32, 6, more=True) == array.ctypes.data


def changed(bundle: Path, folder: Path, change: Callable[[Any], None]) -> Bundle:
    """A copy whose drafter's graph somebody changed."""
    return open_bundle(with_graphs(bundle, folder / "changed", change, roles=["drafter"]), check="full")


def norms(model: Any) -> list[Any]:
    """The vectors of float32: weights of norms."""
    return [tensor for tensor in model.graph.initializer if tensor.data_type == 1 and len(tensor.dims) == 1 and tensor.dims[0] > 1]


def scales(model: Any) -> list[Any]:
    """The scales of int8 keys and values."""
    names = {name for node in model.graph.node for name in node.input if node.op_type == "DequantizeLinear"}
    body = [node for outer in model.graph.node for attribute in outer.attribute for node in attribute.g.node]
    names |= {name for node in body if node.op_type == "DequantizeLinear" for name in node.input}
    names |= {name for node in body if node.op_type == "GroupQueryAttention" for name in node.input[12:14]}
    return [tensor for tensor in model.graph.initializer if tensor.name in names and tensor.data_type == 1]


@kernels
@pytest.mark.parametrize(("kv", "chosen"), [("f32", norms), ("int8", scales)])
def test_weights_of_another_type_are_not_read_as_floats(onnx_pair: Bundles, tmp_path: Path, kv: Any, chosen: Any) -> None:
    sound = onnx_pair("int8", kv=kv)
    found: list[int] = []

    def change(model: Any) -> None:
        found.append(len(tensors := chosen(model)))
        for tensor in tensors:  # one of uint8, with as many elements and a quarter of the bytes
            tensor.data_type = 2
            for entry in tensor.external_data:
                if entry.key == "length":
                    entry.value = str(int(entry.value) // 4)
            tensor.raw_data = tensor.raw_data[: len(tensor.raw_data) // 4]

    bundle = changed(sound, tmp_path, change)
    assert found[0] > 1
    files = pair_of(bundle, drafter=True)
    target, _ = open_pair(pair_of(open_bundle(sound), drafter=True), OPTIONS)
    with target:
        assert isinstance(target, OrtTarget)
        assert files.drafter is not None
        with pytest.raises((OtherGraphError, ValueError)):
            KernelDrafter(files.drafter, target, files.layout, load_draft(files.drafter, files.layout, target.hidden_size, 1))
    with pytest.raises(EdgeRuntimeError, match="onnxruntime"):
        open_onnx(bundle, OPTIONS, None)


def the(model: Any, operator: str, place: int = 0) -> Any:
    """A node of the graph, by its operator and its place among those."""
    return [node for node in nodes_of(model.graph) if node.op_type == operator][place]


def several_factors(model: Any) -> None:
    """The embedding's factor becomes two."""
    name = the(model, "Mul").input[1]
    factor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    factor.dims[:], factor.raw_data = [2], 2 * factor.raw_data


@kernels
@pytest.mark.parametrize(
    "change",
    [
        several_factors,
        lambda model: the(model, "NormRows", 1).ClearField("input"),
        lambda model: the(model, "GatherBlockQuantized").ClearField("output"),
        lambda model: the(model, "TopK").ClearField("input"),
    ],
    ids=["several factors", "no weights of a norm", "no rows", "no number"],
)
def test_a_graph_that_lacks_a_part_is_none_of_the_kernels(onnx_pair: Bundles, tmp_path: Path, change: Callable[[Any], None]) -> None:
    bundle = changed(onnx_pair("int8"), tmp_path, change)
    with pytest.raises(OtherGraphError):
        read_weights(bundle.path("drafter", "onnx"), bundle.manifest.cache_layout)


def with_sizes(bundle: Bundle, **sizes: int) -> Bundle:
    return replace(bundle, manifest=replace(bundle.manifest, architecture=replace(bundle.manifest.architecture, **sizes)))


@pytest.mark.parametrize("sizes", [{"vocab_size": 1 << 45}, {"hidden_size": 1 << 45}])
def test_arrays_of_a_size_that_no_machine_has_are_refused(onnx_pair: Bundles, sizes: dict[str, int]) -> None:
    with pytest.raises(BackendError, match="of memory are available"):
        open_onnx(with_sizes(open_bundle(onnx_pair("int8")), **sizes), OPTIONS, None)


def test_a_context_that_does_not_fit_is_refused(onnx_pair: Bundles) -> None:
    with pytest.raises(BackendError, match="ask for a shorter context"):
        open_onnx(open_bundle(onnx_pair("int8")), replace(OPTIONS, context=1 << 40), None)


def test_tables_take_no_more_than_they_hold() -> None:
    rotations = [Rotation(kind="full", base=1e6, head_dim=128, rotated_pairs=16)]
    tracemalloc.start()
    try:
        tables = rotary_tables(rotations, 40_000)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.2 * held
    assert held < 1.1 * 2 * 40_000 * 64 * 4
    exponents = np.arange(16, dtype=np.float32) * 2 / np.float32(128)
    angles = np.zeros((40_000, 64))
    angles[:, :16] = np.arange(40_000, dtype=np.float32)[:, None] * (np.float32(1) / np.float32(1e6) ** exponents)
    assert (tables["cosine_full"] == np.cos(angles).astype(np.float32)).all()
    assert (tables["sine_full"] == np.sin(angles).astype(np.float32)).all()


FEW = """
import resource, sys
from pathlib import Path
from edge_runtime.backends.onnx.open import OrtOptions, open_pair
from edge_runtime.backends.onnx.target import pair_of
from edge_runtime.bundle.bundle import open_bundle
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
target, drafter = open_pair(pair_of(open_bundle(Path(sys.argv[1])), drafter=True), OrtOptions(context=256, threads=1))
target.prefill([5, 6, 7])
print(type(drafter).__name__, len(drafter.draft(8, 3)))
"""


@kernels
@pytest.mark.skipif(os.name != "posix", reason="sets the limit of descriptors")
def test_few_descriptors_are_enough(onnx_pair: Bundles) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", FEW, onnx_pair("int8")], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.returncode) == ("KernelDrafter 3\n", 0), done.stderr[-2000:]


@kernels
def test_weights_that_cannot_be_mapped_end_in_a_sentence(onnx_pair: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(24, "Too many open files")

    bundle = open_bundle(onnx_pair("int8"))  # exported before, which maps files too
    monkeypatch.setattr(drafter.np, "memmap", refused)
    with pytest.raises(BackendError, match=r"cannot be mapped \(Too many open files\)"):
        open_onnx(bundle, OPTIONS, None)
