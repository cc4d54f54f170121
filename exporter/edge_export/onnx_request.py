"""What may be asked of an ONNX export. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from edge_export.errors import ExportError
from edge_export.sources import ResolvedSource

OnnxWeights = Literal["f32", "f16", "int8", "int4"]
ONNX_WEIGHTS: tuple[OnnxWeights, ...] = get_args(OnnxWeights)
Block = Literal[32, 64, 128]
BLOCKS: tuple[Block, ...] = get_args(Block)
# Role, path, format and quantization of a file in the bundle.
OnnxPart = tuple[str, Path, str, str | None]
# Bytes per weight, with a float32 scale for each block of 32.
_BYTES: dict[OnnxWeights, float] = {"f32": 4.0, "f16": 2.0, "int8": 1.125, "int4": 0.625}


@dataclass(frozen=True, kw_only=True)
class OnnxRequest:
    """How the two models' weights are stored; `block` is that of int8 and int4. `embedding` None: as the target's other weights.

    Arithmetic is in float32 with f32 and f16 weights; int8 and int4 multiply with activations rounded to int8.
    """

    target: OnnxWeights = "int4"
    drafter: OnnxWeights = "int8"
    block: Block = 32
    embedding: OnnxWeights | None = None

    @property
    def weighed(self) -> set[str]:
        """The roles whose quantization takes account of importance."""
        return {role for role, weights in (("target", self.target), ("drafter", self.drafter)) if weights in ("int8", "int4")}


def expected_onnx_bytes(weight_count: int, weights: OnnxWeights) -> int:
    """Returns about how many bytes so many weights take."""
    return int(weight_count * _BYTES[weights])


def check_onnx_sources(target: ResolvedSource, drafter: ResolvedSource) -> None:
    """Raises ExportError if there is no ONNX form of this pair."""
    for source in (target, drafter):
        if source.gguf is not None:
            raise ExportError(f"{source.origin} is a GGUF; ONNX graphs are made from a checkpoint folder or hub id, give that")
