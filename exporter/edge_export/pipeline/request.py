"""What an export is asked for, and the interface by which it reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from edge_devices.machine.facts import usable_processors
from edge_export.gguf.media_encoder import EncoderType
from edge_export.onnx.request import OnnxRequest
from edge_export.quantization.importance_sources import ImportanceSources
from edge_runtime.config.schema import SpeculativeConfig

DEFAULT_CONTEXT = 4096
TUNING_MINUTES = 10.0


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
class Tuning:
    """A text of the user to tune the drafter on, and the minutes of training."""

    text: Path
    minutes: float = TUNING_MINUTES


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What to export. A source is a checkpoint folder, a hub id, or a GGUF, which is used unchanged.

    Quantizations: one of bundle.gguf_types.OFFERED, or None for the default.
    `context`: tokens; None means DEFAULT_CONTEXT, or the model's own context if that is shorter.
    `verify`: compare the export with the reference implementation. `force`: replace an existing bundle.
    `threads`: None means one per usable processor.
    `gguf`, `onnx`: which formats to write; at least one of them.
    `config`: run settings for the bundle's config.yaml, over the defaults.
    `media`: weight type of the encoder of images and sound, None leaves it out.
    `tuning`: train the drafter on a text first, and export it instead if it accepts more.
    `importance`: importance matrices, or the text to compute them from. `sign`: private key that signs the manifest.
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
    importance: ImportanceSources = field(default_factory=ImportanceSources)
    sign: Path | None = None
    media: EncoderType | None = None
    tuning: Tuning | None = None

    @property
    def thread_count(self) -> int:
        """How many threads to use."""
        return self.threads or usable_processors()
