"""What an export is asked for, and who hears how it goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from edge_export.onnx.request import OnnxRequest
from edge_export.quantization.importance_sources import Weighing
from edge_runtime.config.schema import SpeculativeConfig


class Progress(Protocol):
    """Hears how an export goes on."""

    def step(self, title: str, total_bytes: int | None) -> None:
        """A step begins; `total_bytes` is None where there is nothing to count, and otherwise an estimate."""

    def advance(self, done_bytes: int) -> None:
        """So many more bytes of the step are done."""

    def say(self, sentence: str) -> None:
        """Something worth telling."""


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What to export. A source is a checkpoint folder, a hub id, or a GGUF, which is taken as it is.

    Quantizations: one of quantize.QUANTIZATIONS, or None for the default. `context` in tokens (None: 4096, or the model's own if shorter).
    `onnx` asks for ONNX graphs, `gguf` for GGUF files; at least one of them is wanted.
    `config` is what the bundle's config.yaml is to say of how it is run; the rest of it is the defaults.
    `weighing` is what quantization errors are weighed by, if by anything. `sign` is the private key that signs the manifest.
    """

    target: str
    drafter: str
    output: Path
    target_quantization: str | None = None
    drafter_quantization: str | None = None
    context: int | None = None
    verify: bool = True
    force: bool = False
    threads: int | None = None
    gguf: bool = True
    onnx: OnnxRequest | None = None
    config: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    weighing: Weighing = field(default_factory=Weighing)
    sign: Path | None = None
