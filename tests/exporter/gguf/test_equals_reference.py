"""Every member's GGUF against llama.cpp's own convert_hf_to_gguf.py: same keys, same tensors, same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converter import convert
from tiny_members import MEMBERS

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.peer

from edge_export.checkpoint.checkpoint import open_checkpoint
from edge_export.checkpoint.safetensors import FloatType
from edge_export.checkpoint.tokenizer_vocabulary import read_vocabulary
from edge_export.gguf.writer import plan_gguf

WEIGHT_TYPES: list[FloatType] = ["f32", "f16", "bf16"]
# Keys or tensors that may differ, with the reason. Empty: nothing differs.
DIFFERENCES: dict[str, str] = {}


@pytest.fixture(scope="module")
def reference(member_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the GGUF files llama.cpp's converter makes of all members, in all weight types."""
    out = tmp_path_factory.mktemp("reference")
    convert([(member_folder(name), out / f"{name}-{kind}.gguf", kind) for name in MEMBERS for kind in WEIGHT_TYPES])
    return out


def _fields(reader: Any) -> dict[str, tuple[list[str], Any]]:
    return {key: ([kind.name for kind in field.types], field.contents()) for key, field in reader.fields.items()}


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize("name", MEMBERS)
def test_same_file(name: str, weight_type: FloatType, member_folder: Callable[[str], Path], reference: Path, tmp_path: Path) -> None:
    checkpoint, path, written = open_checkpoint(member_folder(name)), tmp_path / "ours.gguf", []
    plan = plan_gguf(checkpoint, weight_type, read_vocabulary(checkpoint.folder))
    plan.write(path, written.append)
    theirs_path = reference / f"{name}-{weight_type}.gguf"
    ours, theirs = gguf.GGUFReader(path), gguf.GGUFReader(theirs_path)
    our_fields, their_fields = _fields(ours), _fields(theirs)
    assert set(our_fields) ^ set(their_fields) <= set(DIFFERENCES)
    for key, value in their_fields.items():
        assert key in DIFFERENCES or our_fields[key] == value, key
    our_tensors = {tensor.name: tensor for tensor in ours.tensors}
    assert [tensor.name for tensor in ours.tensors] == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = our_tensors[tensor.name]
        assert (list(mine.shape), mine.tensor_type) == (list(tensor.shape), tensor.tensor_type), tensor.name
        assert np.array_equal(mine.data.view(np.uint8), tensor.data.view(np.uint8)), tensor.name
    assert path.read_bytes() == theirs_path.read_bytes()
    assert sum(written) == plan.bytes == path.stat().st_size
