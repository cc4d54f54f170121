"""The export request, and the plan that follows from it once its sources are open."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_devices.machine.processors import usable_processors
from edge_devices.option_fields import option
from edge_devices.waiting import Progress
from edge_export.checkpoint.sources import ResolvedSource
from edge_export.gguf.media_encoder import ENCODER_TYPES, EncoderType
from edge_export.onnx.request import OnnxRequest
from edge_export.parity.reference import Reference
from edge_export.quantization.calibration import ImportanceSources
from edge_runtime.bundle.gguf_header import OFFERED
from edge_runtime.bundle.manifest import CacheLayout, DrafterTuning, GenerationDefaults, MediaInputs
from edge_runtime.config.schema import SpeculativeConfig

DEFAULT_CONTEXT = 4096
TARGET_QUANTIZATION, DRAFTER_QUANTIZATION = "q4_k_m", "q8_0"
# The default for weights that were trained for it, because it stores these exactly.
TRAINED_QUANTIZATION = "q4_0"
# The manifest's `parity` if there was no comparison.
SWITCHED_OFF = {"skipped": "it was switched off with --no-verify"}


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What to export, and how.

    The help texts of options describe the fields that are options. `target` and `drafter` are each a checkpoint folder, a hub id, or a
    GGUF, which is used unchanged. `gguf` and `onnx` say which formats to write; at least one is needed. `config` holds settings for the
    bundle's config.yaml, which override the defaults. `importance` holds importance matrices, or the text from which to compute them.
    `description` is a sentence about the model. `acceptance` holds counts of drafts that were measured with the pair before
    (`Manifest.acceptance`). If `threads` is None, there is one thread per usable processor.
    """

    target: str
    drafter: str
    output: Path
    media: EncoderType | None = option(
        choices=ENCODER_TYPES,
        help="Add the encoder of images and sound, with weights of this type; with ONNX graphs only for E2B and E4B.  [default: text only]",
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
        help=f"Quantization of the target's GGUF.  [default: {TARGET_QUANTIZATION}; {TRAINED_QUANTIZATION} for weights that were trained"
        " for it]",
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
        help="Train the drafter on what the model writes after parts of this text file, a few hundred kB of the kind of text that"
        " the model will read. It replaces the original if more of its drafts are accepted on text that it has not seen.",
    )
    tune_minutes: float = option(
        default=10.0,
        low=0.01,
        metavar="M",
        panel="Tuning",
        help="Minutes of training for --tune-drafter; before it, the model writes texts for at most as long.",
    )
    threads: int | None = None
    description: str | None = None
    acceptance: dict[str, Any] | None = None
    gguf: bool = True
    onnx: OnnxRequest | None = None
    config: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    importance: ImportanceSources = field(default_factory=ImportanceSources)

    @property
    def thread_count(self) -> int:
        return self.threads or usable_processors()


@dataclass(frozen=True, kw_only=True)
class ExportJob:
    """A checked request with the opened pair, and the values that are derived from them.

    If `sparse_head`, a GGUF file with the drafter's sparse head is written too. `left_out` are groups of tensors that are not exported,
    each with the role of its half.
    """

    request: ExportRequest
    progress: Progress
    reference: Reference
    context: int
    layout: CacheLayout
    sparse_head: bool
    left_out: tuple[tuple[str, str], ...]
    media: MediaInputs | None
    generation: GenerationDefaults | None
    template: str | None
    tuning: DrafterTuning | None = None

    @property
    def pair(self) -> tuple[ResolvedSource, ResolvedSource]:
        """Target and drafter."""
        return self.reference.target, self.reference.drafter
