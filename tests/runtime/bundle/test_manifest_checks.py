"""What of an ONNX bundle's manifest is checked before anything is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.manifest import with_hash
from edge_runtime.errors import BundleError

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "data" / "manifest-2.json").read_text())
# As it was exported, with the golden bundle's file in the place of its own.
ONNX = json.loads((ROOT / "fuzz" / "corpus" / "manifest" / "onnx.json").read_text()) | {"files": GOLDEN["files"]}
MEDIA = {"image": {"begin": 5, "placeholder": 6, "end": 7}}


def opened(folder: Path, **changes: Any) -> None:
    """Opens a bundle with these changes: a place, with its parts joined by __, and its value."""
    data = json.loads(json.dumps(ONNX | {"media": MEDIA}))
    for path, value in changes.items():
        *parents, last = [int(part) if part.isdigit() else part for part in path.split("__")]
        place = data
        for part in parents:
            place = place[part]
        place[last] = value
    (folder / "target.gguf").write_bytes(b"not really a model")
    (folder / "manifest.json").write_text(with_hash(data))
    open_bundle(folder)


def test_it_is_read_as_it_was_exported(tmp_path: Path) -> None:
    opened(tmp_path)
    opened(tmp_path, onnx__rotations__0__rotated_pairs=ONNX["onnx"]["rotations"][0]["head_dim"] // 2, onnx__bos_token=4095)


HEADS = {f"cache_layout__buffers__{number}__head_dim": 65536 for number in range(4)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"onnx__rotations__0__rotated_pairs": 1 << 28}, "turns 268435456 pairs of heads of"),
        ({"onnx__rotations__1__rotated_pairs": 33}, "turns 33 pairs of heads of 64"),
        ({"onnx__rotations__0__head_dim": 65536}, "heads of 65536 are wider than any, 8192 at most"),
        ({"cache_layout__full__head_dim": 8194}, "heads of 8194 are wider"),
        (HEADS, "heads of 65536 are wider"),
        ({"onnx__rotations__0__head_dim": 64}, "the rotations are for heads of"),
        ({"cache_layout__buffers__0__head_dim": 32}, "the rotations are for heads of"),
        ({"onnx__rotations__1__kind": "full"}, "the rotations are for heads of"),
        ({"onnx__rotations": []}, "the rotations are for heads of"),
        ({"onnx__bos_token": 1 << 40}, r"the facts of the graphs name a token beyond the vocabulary of 4096 \(1099511627776\)"),
        ({"onnx__eos_token": 4096}, "beyond the vocabulary of 4096"),
        ({"onnx__eog_tokens": [1, 4096]}, "beyond the vocabulary of 4096"),
        ({"onnx__control_tokens": [0, 1 << 33]}, "beyond the vocabulary of 4096"),
        ({"media__image__placeholder": 4096}, "the media inputs name a token beyond the vocabulary"),
        ({"generation": {"end_tokens": [4096]}}, "the generation defaults name a token beyond the vocabulary"),
        ({"cache_layout__buffers__0__key": "key\ud800"}, "has the name 'key.*', which none is"),
        ({"cache_layout__buffers__0__value": "\x1b[2J"}, "has the name"),
        ({"cache_layout__buffers__0__kind": ""}, "has the name ''"),
        ({"onnx__rotations__0__kind": "full\n"}, "has the name"),
        ({"onnx__contrib_ops": ["x" * 201]}, "has the name"),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BundleError, match=words) as caught:
        opened(tmp_path, **changes)
    assert str(caught.value).isprintable()
