"""Stand-ins for the files of a bundle, to fuzz readers without a model."""

from __future__ import annotations

import json
from pathlib import Path

from fuzzing.readers import CORPUS

# Content of the files named in the manifests of the corpus.
DUMMIES = {
    "target.gguf": b"t" * 11,
    "drafter.gguf": b"d" * 7,
    "tokenizer.json": b"{}",
    "weights.onnx_data": b"w" * 64,
    "target.onnx": b"g" * 5,
}


def make_weights(folder: Path) -> None:
    """Writes the weight files of the corpus's graphs, as sparse files."""
    for name, size in json.loads((CORPUS / "onnx-data.json").read_text()).items():
        with (folder / name).open("wb") as file:
            file.truncate(size)
