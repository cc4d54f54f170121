"""Importance: llama.cpp's two file formats are read and distrusted, and what they hold must be this model's."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_export.checkpoint.checkpoint import Checkpoint, open_checkpoint
from edge_export.errors import ExportError
from edge_export.gguf.keys import gguf_name
from edge_export.quantization import importance
from edge_export.quantization.importance import ChannelSums, fitted, read_imatrix, write_imatrix
from edge_runtime.bundle.manifest import ImportanceSource

Folders = Callable[[str], Path]
SOURCE = ImportanceSource(kind="imatrix", name="some.dat", bytes=1, sha256="0")


def older(entries: dict[str, ChannelSums], calls: int = 4) -> bytes:
    """The older format, as llama-imatrix writes it: means times calls, then a remark."""
    pieces = [struct.pack("<i", len(entries))]
    for name, entry in entries.items():
        means = (entry.sums.reshape(len(entry.counts), -1) / entry.counts[:, None]).reshape(-1)
        pieces += [
            struct.pack("<i", len(name)),
            name.encode(),
            struct.pack("<ii", calls, means.size),
            (means * calls).astype("<f4").tobytes(),
        ]
    return b"".join(pieces) + struct.pack("<ii", calls, 4) + b"text"


def model_sums(checkpoint: Checkpoint) -> dict[str, ChannelSums]:
    """Sums for every matrix of the blocks that is multiplied with."""
    random, result = np.random.default_rng(1), {}
    for name, tensor in checkpoint.tensors.items():
        short = gguf_name(name) or ""
        matrices = tensor.shape[0] if len(tensor.shape) == 3 else 1
        if short.startswith("blk.") and len(tensor.shape) > 1 and "ffn_gate_inp" not in short:
            counts = np.full(matrices, 50.0)
            result[short] = ChannelSums(sums=random.gamma(0.5, 100, matrices * tensor.shape[-1]), counts=counts)
    return result


@pytest.fixture
def checkpoint(member_folder: Folders) -> Checkpoint:
    return open_checkpoint(member_folder("26b-a4b"))


@pytest.mark.parametrize("newer", [True, False])
def test_both_formats_give_the_means(newer: bool, checkpoint: Checkpoint, tmp_path: Path) -> None:
    sums, path = model_sums(checkpoint), tmp_path / "importance"
    if newer:
        write_imatrix(path, sums, "text.txt", 1024, 512)
    else:
        path.write_bytes(older(sums))
    entries, source = read_imatrix(path)
    assert (source.kind, source.name, source.bytes, len(source.sha256)) == ("imatrix", "importance", path.stat().st_size, 64)
    importance = fitted(entries, checkpoint, source)
    for name, entry in sums.items():
        means = entry.sums.reshape(len(entry.counts), -1) / 50
        assert importance.values[name].shape == means.shape
        assert np.allclose(importance.values[name], np.maximum(means, 1e-6 * means.mean(1, keepdims=True)), rtol=1e-5)
    assert importance.of("model.layers.0.experts.down_proj") is importance.values["blk.0.ffn_down_exps.weight"]
    assert importance.of("model.layers.0.experts.down_proj").shape == (4, 24)
    assert importance.of("model.embed_tokens.weight") is None
    assert importance.of("not.a.tensor") is None


def test_shared_layers_need_no_keys_and_values(member_folder: Folders) -> None:
    checkpoint = open_checkpoint(member_folder("e2b-text"))
    layer, owners = checkpoint.architecture.layers - 1, checkpoint.architecture.owning_layers
    assert layer >= owners, "the member has layers that share"
    sums = {name: entry for name, entry in model_sums(checkpoint).items() if name != f"blk.{layer}.attn_k.weight"}
    fitted(sums, checkpoint, SOURCE)
    del sums["blk.0.attn_k.weight"]
    folder = re.escape(str(member_folder("e2b-text")))
    with pytest.raises(
        ExportError, match=rf"some.dat has no importance for blk.0.attn_k.weight of {folder}; give the file of exactly this model"
    ):
        fitted(sums, checkpoint, SOURCE)


def test_experts_without_tokens_and_channels_without_values_still_count(checkpoint: Checkpoint) -> None:
    sums = model_sums(checkpoint)
    name = "blk.1.ffn_gate_up_exps.weight"
    width = sums[name].sums.size // 4
    values = sums[name].sums.copy()
    values[:width], values[width : width + 5] = 0, 0
    sums[name] = ChannelSums(sums=values, counts=np.array([0.0, 50, 50, 50]))
    result = fitted(sums, checkpoint, SOURCE).values[name]
    assert (result[0] == 1).all()
    assert (result > 0).all()
    assert np.allclose(result[1, :5] / result[1].mean(), 1e-6, rtol=1e-2)


def test_what_is_not_this_models_is_refused(checkpoint: Checkpoint) -> None:
    sums, name = model_sums(checkpoint), "blk.0.attn_q.weight"
    item = np.ones(1)

    def refused(changes: dict[str, ChannelSums], match: str) -> None:
        with pytest.raises(ExportError, match=match):
            fitted({**sums, **changes}, checkpoint, SOURCE)

    refused({"blk.99.attn_q.weight": sums[name]}, "some.dat has importance for blk.99.attn_q.weight, which .* does not have")
    refused({"output_norm.weight": sums[name]}, "output_norm.weight, which .* does not have")
    refused({name: ChannelSums(sums=np.ones(7), counts=item)}, rf"has 7 values for {name}, its shape \[\d+, \d+\] asks for")
    refused({name: ChannelSums(sums=sums[name].sums, counts=np.ones(3))}, "asks for")
    refused({name: ChannelSums(sums=-sums[name].sums, counts=item)}, f"values for {name} that are negative or not finite")
    refused({name: ChannelSums(sums=sums[name].sums * np.nan, counts=item)}, "not finite")
    refused({name: ChannelSums(sums=sums[name].sums, counts=-item)}, "negative")
    refused({name: ChannelSums(sums=sums[name].sums * 1e300, counts=item)}, "beyond float32")
    with pytest.raises(ExportError, match=r"no importance for blk.0.*, blk.0.*, blk.0.* and \d+ more of "):
        fitted({}, checkpoint, SOURCE)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "it ends at byte 0, 4 are announced"),
        (struct.pack("<i", -1), "it claims -1 entries"),
        (struct.pack("<ii", 1, 1 << 29) + bytes(64), "it claims 536870912 letters of a name"),
        (struct.pack("<ii", 1, 3) + b"abc" + struct.pack("<ii", 1, 2000) + bytes(800), "it claims 2000 values"),
        (struct.pack("<ii", 1, 3) + b"abc" + struct.pack("<ii", -5, 2), "it claims -5 calls"),
        ((struct.pack("<i", 2) + (struct.pack("<i", 3) + b"abc" + struct.pack("<iif", 1, 1, 2.0)) * 2), "abc comes twice"),
        (b"GGUF" + bytes(100), "has GGUF version 0.*given as an importance matrix"),
    ],
)
def test_damaged_files_are_refused(data: bytes, match: str, tmp_path: Path) -> None:
    """Any other damage: the reader "imatrix" of tests/fuzz."""
    path = tmp_path / "damaged"
    path.write_bytes(data)
    with pytest.raises(ExportError, match=match):
        read_imatrix(path)


def test_a_gguf_of_something_else_and_huge_or_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "other.gguf"
    write_imatrix(path, {}, "text", 1, 1)
    with pytest.raises(ExportError, match=r"other.gguf is a GGUF without importance \(.in_sum2 tensors\)"):
        read_imatrix(path)
    with pytest.raises(ExportError, match=r"missing cannot be read \(No such file"):
        read_imatrix(tmp_path / "missing")
    monkeypatch.setattr(importance, "MAX_BYTES", 10)
    with pytest.raises(ExportError, match="it has more than 10 bytes"):
        read_imatrix(path)
