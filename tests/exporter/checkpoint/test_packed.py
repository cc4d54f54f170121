"""Checkpoints of the layout of -qat-w4a16-ct are read directly, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

from edge_export.checkpoint.checkpoint import open_checkpoint
from edge_export.checkpoint.safetensors import read_values
from edge_export.errors import CheckpointError
from edge_export.gguf.writer import trained_for_q4
from published_formats import edit_json, to_w4a16

Folders = Callable[[str], Path]


@pytest.fixture
def packed(copy: Folders) -> tuple[Path, dict[str, np.ndarray]]:
    """A member in the published layout, and the weights that its packed matrices stand for."""
    folder = copy("31b")
    return folder, to_w4a16(folder)


def test_weights_are_read_bit_for_bit(packed: tuple[Path, dict[str, np.ndarray]]) -> None:
    """How they are written: pipeline/test_published_names.py."""
    folder, values = packed
    checkpoint = open_checkpoint(folder)
    assert len(values) > 30
    for name, expected in values.items():
        assert (read_values(checkpoint.tensors[name]) == expected).all(), name
    assert trained_for_q4(checkpoint)


@pytest.mark.parametrize(
    ("part", "change", "unread"),
    [
        ("weights", {"num_bits": 8}, r"num_bits 8 \(read: 4\)"),
        ("weights", {"group_size": 64}, r"group_size 64 \(read: 32\)"),
        ("weights", {"symmetric": False}, r"symmetric False \(read: True\)"),
        ("weights", {"strategy": "channel", "group_size": None}, r"strategy 'channel' \(read: group\), group_size None \(read: 32\)"),
        ("weights", {"actorder": "weight"}, "actorder 'weight'"),
        ("input_activations", {"num_bits": 8, "dynamic": True}, "rounded input_activations"),
    ],
)
def test_other_packed_weights_are_named(part: str, change: dict[str, Any], unread: str, packed: tuple[Path, dict[str, np.ndarray]]) -> None:
    def changed(config: dict[str, Any]) -> None:
        group = config["quantization_config"]["config_groups"]["group_0"]
        group[part] = (group.get(part) or {}) | change

    edit_json(packed[0] / "config.json", changed)
    with pytest.raises(CheckpointError, match=rf"weights of the format 'pack-quantized' with {unread}, which are not read; give"):
        open_checkpoint(packed[0])


def test_scales_that_do_not_fit_are_refused(packed: tuple[Path, dict[str, np.ndarray]]) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    path = packed[0] / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("weight_scale"))
    for wrong in (tensors[name][:, :1].clone() if tensors[name].shape[1] > 1 else tensors[name][:1].clone(), torch.ones(3, 3, 3)):
        save_file(tensors | {name: wrong.contiguous()}, path, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=r"is no matrix \[\d+, \d+\] in 4 bits and blocks of 32"):
            open_checkpoint(packed[0])
