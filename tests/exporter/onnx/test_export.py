"""ONNX graphs of every member against transformers, what the manifest says of them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

onnx = pytest.importorskip("onnx", reason="needs edge-mtp[export]")
pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

from click.testing import CliRunner

from changed_bundle import nodes_of
from edge_export.checkpoint.sources import reference_pair
from edge_export.cli.command import main
from edge_export.errors import ExportError, ParityError
from edge_export.onnx.graphs import blocks as onnx_blocks
from edge_export.onnx.request import OnnxRequest
from edge_export.parity.reference import MIN_CONTEXT
from edge_runtime.bundle.bundle import Bundle, open_bundle
from edge_runtime.bundle.onnx_graph import KERNELS
from edge_runtime.session.open import open_session
from progress_log import ProgressLog

Folders = Callable[[str], Path]
MEMBERS = ["e2b", "e4b", "12b", "31b", "26b-a4b"]


def parity_of(bundle: Bundle) -> dict[str, Any]:
    assert bundle.manifest.parity is not None
    return dict(bundle.manifest.parity["onnx"])


@pytest.mark.parametrize(("member", "device"), [*((name, None) for name in MEMBERS), *((name, "static") for name in MEMBERS[:-1])])
def test_float32_graphs_are_the_reference(member: str, device: str | None, exported: Callable[..., Bundle]) -> None:
    bundle = exported(member, device=device)
    parity = parity_of(bundle)
    assert parity["unquantized"]["max_abs_difference"] < 1e-4
    assert parity["unquantized"] == {key: value for key, value in parity["quantized"].items() if key != "quantization"} | {
        "weight_type": "f32"
    }
    assert parity["drafts"]["unquantized_agreement"] == 1
    with open_session(bundle.folder, threads=1) as session:
        plain, drafted = (session.generate(list(range(300, 360)), max_tokens=60, draft_length=n) for n in (0, 3))
        plain.text(), drafted.text()
        assert plain.tokens == drafted.tokens


def test_a_short_context_is_compared_as_far_as_it_goes(exported: Callable[..., Bundle]) -> None:
    parity = parity_of(exported(context=MIN_CONTEXT))
    assert parity["tokens"] == MIN_CONTEXT
    assert parity["unquantized"]["max_abs_difference"] < 1e-4


@pytest.mark.parametrize(
    ("member", "weights", "device", "maximum"),
    [
        ("e2b", "f16", None, 1e-6),
        ("e2b", "int8", None, 0.005),
        ("e2b", "int4", None, 0.3),
        ("e2b", "f16", "static", 1e-6),
        ("e2b", "int4", "static", 0.3),
        ("26b-a4b", "int8", None, 0.01),  # experts, too
    ],
)
def test_rounded_weights_stay_near_and_float32_graphs_leave_no_trace(
    member: str, weights: str, device: str | None, maximum: float, exported: Callable[..., Bundle]
) -> None:
    bundle = exported(member, weights, device)
    parity = parity_of(bundle)
    assert parity["unquantized"]["max_abs_difference"] < 1e-4
    assert 0 <= parity["quantized"]["mean_kl"] < maximum
    listed = {file.path for file in bundle.manifest.files}
    assert {path.name for path in bundle.folder.iterdir()} == listed | {"manifest.json", "config.yaml", "README.md"}


def test_the_shipped_pair_is_within_a_thousandth(exported: Callable[..., Bundle]) -> None:
    target, drafter = map(str, reference_pair())
    parity = parity_of(exported(target=target, drafter=drafter, context=4096))
    assert parity["unquantized"]["max_abs_difference"] <= 1e-3
    assert parity["drafts"]["unquantized_agreement"] == 1
    assert parity["tokens"] > 128 + 64, "the text is longer than the window"


class Tampering(ProgressLog):
    """Makes a sixteenth of the target's weights zeros before the comparison."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def step(self, title: str, total_bytes: int | None) -> None:
        super().step(title, total_bytes)
        if title == "Compare the ONNX graphs with the reference":
            (path,) = self._folder.glob(".out.partial-*/target*.onnx_data")
            size = path.stat().st_size
            with path.open("r+b") as file:
                file.seek(size // 2)
                file.write(bytes(size // 16))


def test_a_wrong_graph_is_refused_and_nothing_is_left(exported: Callable[..., Bundle], tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="largest logit difference of the f32 graph"):
        exported(progress=Tampering(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_drafter_with_another_window_is_told_from_the_reference(exported: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison's text is longer than the window, so its edge counts."""
    monkeypatch.setattr(onnx_blocks.DrafterBlocks, "window_of", lambda self, layer: 4 if self._model.is_sliding(layer) else -1)
    with pytest.raises(ParityError, match="share of the f32 graph's drafts"):
        exported("e4b")  # with several K/V heads the graph has the window, with one the reader


@pytest.mark.parametrize("member", ["e2b", "e4b"])
@pytest.mark.parametrize(("kv", "kl"), [("f16", 1e-5), ("int8", 0.02)])
def test_smaller_rows_cost_little(member: str, kv: Any, kl: float, exported: Callable[..., Bundle]) -> None:
    """With one K/V head attention is on rows, with several on buffers."""
    bundle = exported(member, onnx=OnnxRequest(target="f32", drafter="f32", kv=kv))
    parity, buffers = parity_of(bundle), bundle.manifest.cache_layout.buffers
    assert {buffer.dtype for buffer in buffers} == {"i8" if kv == "int8" else kv}
    assert ("rows" in {buffer.read for buffer in buffers}) == (member == "e2b")
    assert parity["unquantized"]["mean_kl"] < parity["quantized"]["mean_kl"] < kl
    assert parity["drafts"]["quantized_agreement"] > 0.9
    assert sum(parity["drafts"]["confidence"]["seen"]) > 10


def test_the_manifest_names_every_buffer_operator_set_and_contrib_operator(exported: Callable[..., Bundle]) -> None:
    bundle = exported("12b", "int8", verify=False)
    graphs = [onnx.load(bundle.path(role, "onnx"), load_external_data=False) for role in ("target", "target_head", "drafter")]
    facts, layout = bundle.manifest.onnx, bundle.manifest.cache_layout
    assert facts is not None
    opsets = {("", facts.opset), ("com.microsoft", 1), (KERNELS, 1)}
    assert {(opset.domain, opset.version) for graph in graphs for opset in graph.opset_import} == opsets
    nodes = [node for graph in graphs for part in (graph.graph, *graph.functions) for node in nodes_of(part)]
    used = {node.op_type for node in nodes if node.domain == "com.microsoft"}
    assert set(facts.contrib_ops) == used >= {"GatherBlockQuantized", "GroupQueryAttention", "MatMulNBits"}
    inputs = {value.name: [size.dim_value for size in value.type.tensor_type.shape.dim] for value in graphs[0].graph.input}
    for buffer in layout.buffers:
        for name in (buffer.key, buffer.value):
            shape = inputs.pop(name)
            assert (shape[1], shape[3]) == (buffer.kv_heads, buffer.head_dim)
    assert not [name for name in inputs if name.startswith(("key.", "value."))]
    assert layout.sliding is not None
    assert {buffer.layer for buffer in layout.buffers} == set(layout.full.owner_layers) | set(layout.sliding.owner_layers)
    read = {value.name for value in graphs[2].graph.input if value.name.startswith("key.")}
    assert read == {f"key.{layer}" for layer in layout.drafter_sources}


def locations(graph: Any) -> dict[tuple[str, str], int]:
    """(file, offset) -> length of each piece of external data."""
    actual = {}
    for tensor in graph.graph.initializer:
        entry = {item.key: item.value for item in tensor.external_data}
        if entry:
            actual[entry["location"], entry["offset"]] = int(entry["length"])
    return actual


def test_the_embeddings_bytes_are_there_once_for_target_head_and_drafter(exported: Callable[..., Bundle]) -> None:
    bundle = exported("e2b", "int8", verify=False)
    target, head, drafter = (
        locations(onnx.load(bundle.path(role, "onnx"), load_external_data=False)) for role in ("target", "target_head", "drafter")
    )
    assert head.items() <= target.items(), "the head is the target's embedding"
    foreign = {place: length for place, length in drafter.items() if place[0].startswith("target")}
    assert foreign == head
    for (name, offset), length in (target | drafter).items():
        assert int(offset) + length <= (bundle.folder / name).stat().st_size


def test_a_gguf_is_no_source_of_graphs(exported: Callable[..., Bundle], member_folder: Folders, tmp_path: Path) -> None:
    from edge_export.checkpoint.checkpoint import open_checkpoint
    from edge_export.gguf.writer import write_gguf

    write_gguf(open_checkpoint(member_folder("e2b")), tmp_path / "target.gguf", "f16", lambda _: None)
    with pytest.raises(ExportError, match="is a GGUF; ONNX graphs are made from a checkpoint"):
        exported(target=str(tmp_path / "target.gguf"), drafter=str(member_folder("e2b-assistant")))


def test_both_formats_lie_in_one_bundle(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
    words = "--format both --target-quant f16 --drafter-quant f16 --onnx-target int4 --onnx-embedding int8 --onnx-block 64 --no-verify"
    arguments = ["reference", "-o", str(tmp_path / "out"), *words.split()]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    bundle = open_bundle(tmp_path / "out")
    for kind in ("gguf", "onnx"):
        assert bundle.has("target", kind)
        assert bundle.has("drafter", kind)
    assert bundle.file("target", "onnx").quantization == "int4-b64"
    assert 4.5 < bundle.file("target_data", "onnx_data").bits_per_weight < 8, "4 and 8 bits, and their scales"
    names = {name for name, _ in locations(onnx.load(bundle.path("drafter", "onnx"), load_external_data=False))}
    assert names == {"drafter-int8-b64.onnx_data", "target-int4-b64.onnx_data"}
    for backend in ("llama", "onnx"):
        with open_session(tmp_path / "out", threads=1, backend=backend) as session:  # type: ignore[arg-type]
            assert session.generate("def area(r):", max_tokens=8).text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--format", "gguf", "--onnx-target", "int8"], "need --format onnx or both"),
        (["--format", "onnx", "--target-quant", "q4_0"], "are for GGUF files"),
        (["--format", "onnx", "--onnx-block", "16"], "is not one of"),
        (["--format", "gguf", "--device", "static"], "need --format onnx or both"),
        (["--format", "onnx", "--device", "openvino-npu", "--onnx-block", "32"], "has a fixed block size"),
    ],
)
def test_options_that_contradict_each_other_are_usage_errors(arguments: list[str], words: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["reference", "-o", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    assert words in result.output
