"""What an export is asked for, and the interface by which it reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from edge_devices.machine.facts import usable_processors
from edge_devices.option_fields import option
from edge_export.gguf.media_encoder import ENCODER_TYPES, EncoderType
from edge_export.onnx.request import OnnxRequest
from edge_export.quantization.importance_sources import ImportanceSources
from edge_runtime.bundle.gguf_types import OFFERED
from edge_runtime.config.schema import SpeculativeConfig

DEFAULT_CONTEXT = 4096
TARGET_QUANTIZATION, DRAFTER_QUANTIZATION = "q4_0", "q8_0"


@runtime_checkable
class Progress(Protocol):
    """Gets the progress of an export."""

    def step(self, title: str, total_bytes: int | None) -> None:
        """A step begins; `total_bytes` is an estimate, or None for a step that counts no bytes."""

    def advance(self, done_bytes: int) -> None:
        """So many more bytes of the step are done."""

    def say(self, sentence: str) -> None:
        """A message for the user."""


class Lines:
    """A `Progress` that calls a function with a line for each step and each message."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def step(self, title: str, total_bytes: int | None) -> None:
        """Writes the title, and the estimated size of what is done."""
        self._write(f"{title} (about {total_bytes / 1e6:.0f} MB)" if total_bytes else title)

    def advance(self, done_bytes: int) -> None:
        """Does nothing."""

    def say(self, sentence: str) -> None:
        """Writes the message."""
        self._write(sentence)


def reported(progress: Progress | Callable[[str], None] | None) -> Progress:
    """Returns the `Progress` that was given, or one that calls the function, or one that is silent."""
    if progress is None:
        return Lines(lambda _: None)
    return progress if isinstance(progress, Progress) else Lines(progress)


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What to export; what is an option too is described there. A source is a checkpoint folder, a hub id, or a GGUF, used unchanged.

    `gguf`, `onnx`: which formats to write; at least one of them. `config`: run settings for the bundle's config.yaml, over the defaults.
    `importance`: importance matrices, or the text to compute them from. `threads`: None means one per usable processor.
    """

    target: str
    drafter: str
    output: Path
    media: EncoderType | None = option(
        choices=ENCODER_TYPES,
        help="Add the encoder of images and sound, weights of this type; in ONNX graphs of E2B and E4B only.  [default: text only]",
    )
    context: int | None = option(
        low=1, help="Context length of the bundle, in tokens.  [default: 4096, or the model's own if that is shorter]"
    )
    sign: Path | None = option(
        metavar="KEY", help="Sign the manifest with this Ed25519 private key (PEM); needs pip install 'edge-mtp[sign]'."
    )
    verify: bool = option(
        "--no-verify",
        default=True,
        flag_value=False,
        show_default=False,
        help="Skip the comparison with the reference implementation (transformers).",
    )
    force: bool = option(default=False, help="Replace an existing bundle as soon as the new one is complete.")
    target_quantization: str | None = option(
        "--target-quant",
        choices=OFFERED,
        panel="Quantization",
        help=f"Quantization of the target's GGUF.  [default: {TARGET_QUANTIZATION}, the 4-bit type that CPUs run fastest]",
    )
    drafter_quantization: str | None = option(
        "--drafter-quant",
        choices=OFFERED,
        panel="Quantization",
        help="Quantization of the drafter's GGUF."
        f"  [default: {DRAFTER_QUANTIZATION}, which is nearly lossless and only a few percent of the target's size]",
    )
    tune_drafter: Path | None = option(
        metavar="TEXT",
        panel="Tuning",
        help="Train the drafter on what the target writes after parts of this text file, a few hundred kB of the kind of text that"
        " the model will read. It replaces the original if more of its drafts are accepted on text that it has not seen.",
    )
    tune_minutes: float = option(
        default=10.0,
        low=0.01,
        metavar="M",
        panel="Tuning",
        help="Minutes of training for --tune-drafter; the target writes for as long at most.",
    )
    threads: int | None = None
    gguf: bool = True
    onnx: OnnxRequest | None = None
    config: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    importance: ImportanceSources = field(default_factory=ImportanceSources)

    @property
    def thread_count(self) -> int:
        """How many threads to use."""
        return self.threads or usable_processors()
