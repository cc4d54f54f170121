"""In which form each matrix of the ONNX graphs is stored, and what the rounded sparse head computes."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs edge-mtp[export]")
pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")


from changed_bundle import nodes_of
from edge_export.checkpoint.checkpoint import cluster_rows, open_checkpoint, token_order
from edge_export.checkpoint.sources import reference_pair
from edge_export.onnx.block_quantization import WeightSpec, round_rows
from edge_export.onnx.graph_builder import GraphBuilder
from edge_export.onnx.graphs.drafter import sparse_head
from edge_export.onnx.weights import WeightFile, WeightFormat

Bundles = Callable[..., Path]


def forms_of(graph: Path) -> Counter[tuple[int, int, int]]:
    """How many products there are of each (rows, bits, block)."""
    result: Counter[tuple[int, int, int]] = Counter()
    for node in onnx.load(graph, load_external_data=False).graph.node:
        values = {attribute.name: attribute.i for attribute in node.attribute}
        for prefix in ("", "second_"):  # a feed-forward has two
            if (f"{prefix}block_size" in values and "MatMul" in node.op_type) or node.op_type == "FeedForwardRows":
                result[values[f"{prefix}N"], values[f"{prefix}bits"], values[f"{prefix}block_size"]] += 1
    return result


def test_int4_is_mixed_unless_a_block_is_asked_for(onnx_pair: Bundles) -> None:
    """The shipped pair: 4 owners of 8 layers, Q of 256 and 512 rows, K and V of 64 and 128, gates and what is fed of 512."""
    mixed, plain = (next(onnx_pair("int4", **asked).glob("target-int4-*.onnx")) for asked in ({}, {"block": 32}))
    assert (mixed.name, plain.name) == ("target-int4-mixed.onnx", "target-int4-b32.onnx")
    result = forms_of(mixed)
    # K and V are in blocks of 32; what comes back from the per-layer embeddings has rows of 32 weights.
    assert {format: count for format, count in result.items() if format[1] == 8} == {(128, 8, 32): 3, (256, 8, 32): 1 + 8, (256, 8, 128): 8}
    assert {block for rows, bits, block in result if bits == 4} == {64}
    assert {(bits, block) for _, bits, block in forms_of(plain)} == {(4, 32)}
    head = forms_of(mixed.with_name("target-head-int4-mixed.onnx"))
    assert head == {(4096, 8, 128): 1}


def test_an_int8_target_has_small_blocks_unless_a_block_is_asked_for(onnx_pair: Bundles) -> None:
    small, plain = (next(onnx_pair("int8", **asked).glob("target-int8-*.onnx")) for asked in ({}, {"block": 128}))
    assert (small.name, plain.name) == ("target-int8-b32.onnx", "target-int8-b128.onnx")
    assert {(bits, block) for _, bits, block in forms_of(small)} == {(8, 32)}
    assert forms_of(small.with_name("target-head-int8-b32.onnx")) == {(4096, 8, 32): 1}
    assert small.with_name("drafter-int8-b128.onnx").is_file()
    assert forms_of(plain)[256, 8, 32] == 8, "what comes back from the per-layer embeddings has rows of 32 weights"


# Runs a graph on rows [n, hidden size], one at a time.
RUN = """
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
runs = [session.run(None, {"hidden": row[None, None]}) for row in numpy.load(sys.argv[2])]
numpy.savez(sys.argv[3], scores=[run[0] for run in runs], tokens=[run[1] for run in runs])
"""


@pytest.mark.parametrize("processor", ["this", "Haswell"])
def test_the_rounded_sparse_head_scores_as_the_rows_it_was_made_of(processor: str, tmp_path: Path) -> None:
    """Haswell has no VNNI: its products of uint8 with int8 saturate."""
    if processor != "this" and (platform.machine() != "x86_64" or shutil.which("qemu-x86_64") is None):
        pytest.skip("needs qemu-x86_64 on x86")
    checkpoint = open_checkpoint(reference_pair()[1])
    model, order = checkpoint.assistant, token_order(checkpoint)
    format = WeightFormat(kind="blocks", spec=WeightSpec(bits=8, block=32))
    graph = GraphBuilder("head")
    hidden = graph.input("hidden", "f32", (1, 1, model.hidden_size))
    with WeightFile(tmp_path / "head.onnx_data") as weights:
        head = sparse_head(checkpoint, weights, format)
    scores, tokens = head(graph, hidden)
    graph.output(scores, "f32", ("n",))
    assert tokens is not None
    graph.output(tokens, "i64", ("n",))
    graph.save(tmp_path / "head.onnx")
    values = np.stack([np.random.default_rng(seed).standard_normal(model.hidden_size) + 0.5 * seed for seed in range(5)])
    np.fill_diagonal(values, 50)  # beside which one of 255 levels is nearly nothing
    np.save(tmp_path / "rows.npy", values.astype(np.float32))
    emulator = [] if processor == "this" else ["qemu-x86_64", "-cpu", processor]
    paths = [str(tmp_path / name) for name in ("head.onnx", "rows.npy", "found.npz")]
    subprocess.run([*emulator, sys.executable, "-c", RUN, *paths], check=True)
    levels, scales = round_rows(np.concatenate(list(cluster_rows(checkpoint, order))))
    rows: Any = levels * scales[:, None]
    place = np.argsort(order)
    result = np.load(tmp_path / "found.npz")
    for value, scored, ids in zip(values.astype(np.float32), result["scores"], result["tokens"], strict=True):
        # What two roundings to 8 bits leave of a channel, times the weights.
        left = (value.max() - value.min()) / 255 / 255
        error = np.abs(scored - rows[place[ids]] @ value)
        assert (error <= 0.51 * left * np.abs(rows[place[ids]]).sum(axis=1) + 1e-4).all()
        assert len(set(ids.tolist())) == len(ids) == model.top_centroids * model.vocab_size // model.centroids


@pytest.mark.parametrize("asked", [{}, {"device": "static"}, {"kv": "int8"}])
def test_no_product_of_integers_saturates(asked: dict[str, Any], onnx_pair: Bundles) -> None:
    """Where uint8 is multiplied with int8, two products exceed 16 bits from a weight of 65 on."""
    folder = onnx_pair("int8", **asked)
    products = 0
    for path in folder.glob("*.onnx"):
        graph = onnx.load(path, load_external_data=False).graph
        types = {tensor.name: tensor.data_type for tensor in graph.initializer}
        nodes = list(nodes_of(graph))
        assert not {node.op_type for node in nodes} & {"ConvInteger", "QLinearConv", "QLinearMatMul"}
        gathered = {node.output[0]: node.input[0] for node in nodes if node.op_type == "Gather"}
        for node in nodes:
            if node.op_type == "MatMulInteger":
                products += 1
                assert types[gathered[node.input[1]]] == types[node.input[3]] == onnx.TensorProto.UINT8
    assert products == (0 if "device" in asked else 2)
