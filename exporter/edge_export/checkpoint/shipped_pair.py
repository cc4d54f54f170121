"""The trained pairs that are shipped with the package: small Gemma 4 targets with their MTP drafters, as Hugging Face folders.

Widened, it has the cost of a phone-sized model and the same output. A gated feed-forward layer is down(act(gate x) * up x). New rows of
gate and up and new columns of down are zeros, so that they add act(0) * 0 = 0 to every sum. The zeros are holes of the file, which take no
disk space on common file systems.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from edge_export.checkpoint.safetensors import READABLE, SINGLE_NAME, mapped, read_header
from edge_export.errors import ExportError

_REFERENCE, _CHAT = "reference_pair", "chat_pair"
DESCRIPTION = "the shipped example, which continues Python code and its documentation; it was never taught to answer questions"
CHAT_DESCRIPTION = "the shipped example for a chat, which was taught short answers about Python, units and edge-mtp; it knows nothing else"
WIDENED = "; zeros give it the cost of a phone-sized model"
# 488 million target weights instead of 8 million: about as many bytes per token as a phone-sized model in 4 bits.
FACTOR = 96
_ROWS, _COLUMNS = (".mlp.gate_proj.weight", ".mlp.up_proj.weight"), ".mlp.down_proj.weight"


def reference_pair() -> tuple[Path, Path]:
    """Returns the folders of the shipped target and drafter. Raises ExportError if the package was installed without them."""
    return _shipped(_REFERENCE)


def chat_pair() -> tuple[Path, Path]:
    """As `reference_pair`, of the same pair after it was taught a few hundred short answers."""
    return _shipped(_CHAT)


def shipped_acceptance(drafter: Path) -> dict[str, Any]:
    """Returns the counts of drafts that were measured with a shipped pair, by its drafter's folder; the widened pair has the same."""
    counts: dict[str, Any] = json.loads((drafter.parent / "drafts.measured.json").read_text(encoding="utf-8"))
    return counts


def _shipped(name: str) -> tuple[Path, Path]:
    # The package is never run from an archive (its model files are read by path), so a resource is a real folder.
    folder = Path(str(files("edge_export"))) / name
    target, drafter = folder / "target", folder / "drafter"
    for part in (target, drafter):
        if not (part / "config.json").is_file():
            raise ExportError(f"the {name.replace('_', ' ')} is not installed: {part} has no config.json; install edge-mtp again")
    return target, drafter


@contextlib.contextmanager
def widened_target(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder with the widened twin of a target's checkpoint folder."""
    with tempfile.TemporaryDirectory(prefix="edge-export-") as place:
        output = Path(place) / "reference-widened"
        widen_target(folder, output)
        yield output


def widen_target(folder: Path, output: Path, factor: int = FACTOR) -> None:
    """Writes the widened twin of a target's checkpoint folder to the new folder `output`."""
    output.mkdir(parents=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["intermediate_size"] *= factor
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        if path.name not in ("config.json", SINGLE_NAME):
            shutil.copy(path, output / path.name)
    _widen(folder / SINGLE_NAME, output / SINGLE_NAME, factor)


def _widen(source: Path, output: Path, factor: int) -> None:
    tensors, header, end = read_header(source), dict[str, dict[str, Any]](), 0
    for name, tensor in tensors.items():
        shape = list(tensor.shape)
        if name.endswith((*_ROWS, _COLUMNS)):
            shape[1 if name.endswith(_COLUMNS) else 0] *= factor
        begin, end = end, end + tensor.bytes * prod(shape) // prod(tensor.shape)
        header[name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with output.open("wb") as file:  # what is not written is zeros
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    for name, wide in read_header(output).items():
        values = np.memmap(output, READABLE[wide.dtype], "r+", wide.offset, wide.shape)
        values[tuple(map(slice, tensors[name].shape))] = mapped(tensors[name])
