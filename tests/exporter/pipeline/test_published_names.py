"""Every repository that Google published: fetched by its name from a hub on this machine, exported, and decoded with drafts.

Each holds a small synthetic checkpoint in its layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="needs edge-mtp[export]")
pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
pytest.importorskip("transformers", reason="needs edge-mtp[verify]")
pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

from edge_export.checkpoint.checkpoint import open_checkpoint
from edge_export.checkpoint.tokenizer_vocabulary import read_vocabulary
from edge_export.gguf.keys import gguf_name
from edge_export.gguf.writer import ExactReport, plan_exact
from edge_export.onnx.request import OnnxRequest
from edge_export.pipeline.export import export_pair
from edge_export.pipeline.request import ExportRequest
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.session.open import open_session
from edge_runtime.session.self_checks import check_lossless
from fake_hub import FakeHub, point_client_at, serving
from published_formats import bfloat16, to_mobile, to_q4_grid, to_w4a16
from tiny_members import settle, settled, write_member

Folders = Callable[[str], Path]
Values = dict[str, np.ndarray]
SIZES = ("E2B", "E4B", "12B", "26B-A4B", "31B")
# Whole blocks of 32 in every matrix, as the published shapes have.
WHOLE_BLOCKS = {
    "E2B": {"hidden_size_per_layer_input": 32},
    "E4B": {"hidden_size_per_layer_input": 32},
    "26B-A4B": {"moe_intermediate_size": 32},
}
QAT = ("-it-qat-q4_0-unquantized", "-it-qat-q4_0-gguf", "-it-qat-w4a16-ct", "-it-qat-mobile-transformers", "-it-qat-mobile-ct")
# Rows are compared with transformers' once for each class and once for each layout: layouts are read alike for all sizes, and E4B is of
# E2B's class.
COMPARED = {("E2B", suffix) for suffix in ("-it", *QAT)} | {("12B", "-it"), ("26B-A4B", "-it"), ("26B-A4B", QAT[0]), ("31B", "-it")}
# Irregular, as published.
GGUF_NAMES = {"E2B": "gemma-4-E2B_q4_0-it.gguf", "12B": "gemma-4-12b-it-qat-q4_0.gguf", "26B-A4B": "gemma-4-26B_q4_0-it.gguf"}
PUBLISHED = [
    (size, suffix)
    for size in SIZES
    for suffix in ("-it", *QAT)
    if not ("mobile" in suffix and size not in ("E2B", "E4B")) and not ("w4a16" in suffix and size == "26B-A4B")
]


@dataclass(frozen=True, kw_only=True)
class Published:
    """The names of a target and of its drafter, and the weights that the target's codes stand for."""

    target: str
    drafter: str
    values: Values


@pytest.fixture
def published(member_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Published]]:
    with serving(FakeHub({})) as hub:
        point_client_at(hub, tmp_path / "cache", monkeypatch)

        def publish(size: str, suffix: str) -> Published:
            drafter = f"google/gemma-4-{size}-it{'-qat-q4_0-unquantized' if 'qat' in suffix else ''}-assistant"
            hub.repositories[drafter] = {"main": settled(member_folder, f"{size.lower()}-assistant")}
            folder, values = target_folder(member_folder, size, suffix, tmp_path / "target")
            hub.repositories[f"google/gemma-4-{size}{suffix}"] = {"main": folder}
            return Published(target=f"google/gemma-4-{size}{suffix}", drafter=drafter, values=values)

        yield publish


def target_folder(member_folder: Folders, size: str, suffix: str, folder: Path) -> tuple[Path, Values]:
    """A repository's files, and the weights that they stand for."""
    if "qat" not in suffix:
        return settled(member_folder, size.lower()), {}
    write_member(size.lower(), folder, **WHOLE_BLOCKS.get(size, {}))
    settle(folder)
    if "w4a16" in suffix:
        values = to_w4a16(folder)
    elif "mobile" in suffix:
        values = to_mobile(folder, compressed=suffix.endswith("-ct"))
    else:
        values = to_q4_grid(folder)
    return (with_gguf(folder, size), values) if suffix.endswith("-gguf") else (folder, values)


def with_gguf(source: Path, size: str) -> Path:
    """Google's GGUF repository: one language model, one file of encoders, no drafter."""
    folder = source.parent / "files"
    folder.mkdir()
    plan = plan_exact(open_checkpoint(source), read_vocabulary(source), ExactReport())
    plan.write(folder / GGUF_NAMES.get(size, f"gemma-4-{size}_q4_0-it.gguf"), lambda _: None)
    (folder / f"gemma-4-{size}-it-mmproj.gguf").write_bytes(b"GGUF")
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("few_drafts")
@pytest.mark.parametrize(("size", "suffix"), PUBLISHED)
def test_a_published_name_becomes_a_bundle(size: str, suffix: str, published: Callable[[str, str], Published], tmp_path: Path) -> None:
    names = published(size, suffix)
    has_gguf, has_onnx = "mobile" not in suffix, not suffix.endswith("-gguf")
    request = ExportRequest(
        target=names.target,
        drafter=names.drafter,
        output=tmp_path / "bundle",
        gguf=has_gguf,
        onnx=OnnxRequest() if has_onnx else None,
        context=512,
        verify=(size, suffix) in COMPARED,
    )
    bundle = export_pair(request)
    parity = bundle.manifest.parity or {}
    if has_gguf and names.values:
        equal, total = exact_tensors(bundle, names.values)
        assert equal == total > 20
    for figures in (parity, parity.get("onnx", {})):
        if "quantized" in figures:
            assert figures["quantized"]["mean_kl"] < (0.01 if names.values else 0.2)
    if has_gguf:
        check_drafts(bundle, "llama")
    if has_onnx:
        check_drafts(bundle, "onnx")


def exact_tensors(bundle: Bundle, values: Values) -> tuple[int, int]:
    """How many of these weights the target's GGUF file holds as they are, up to the rounding to bfloat16 that the checkpoint has."""
    written = {tensor.name: tensor for tensor in gguf.GGUFReader(bundle.path("target", "gguf")).tensors}
    equal, total = 0, 0
    for name, expected in values.items():
        tensor = written.get(gguf_name(name) or "")
        if tensor is None:
            continue
        total += 1
        result = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(-1)
        equal += bool((bfloat16(result) == bfloat16(expected.reshape(-1))).all())
    return equal, total


def check_drafts(bundle: Bundle, backend: Literal["llama", "onnx"]) -> None:
    """48 tokens with drafts equal plain decoding."""
    with open_session(bundle.folder, backend=backend, context=256, threads=1) as session:
        generation = session.generate("the word and the number", max_tokens=48, draft_length=3)
        for _ in generation.rounds():
            pass
        report = check_lossless(session, generation)
    assert report.equal, report.sentence()
    assert generation.stats.drafted > 0
