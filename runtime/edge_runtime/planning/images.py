"""Predicts what an image costs: the encode phase by the vision tower's operations, then the prefill of its soft rows.

Operations are two per weight and patch, and four per pair of patches, width and layer for attention. Weights are read once an image, which
is little beside its patches, so that reading is left out. Every figure is an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.bundle.manifest import MEDIA_ENCODER, Manifest, VisionSize
from edge_runtime.drafting.phase_power import PhasePower
from edge_runtime.media.image import DEFAULT_BUDGET, PATCH, POOLING, SIDE
from edge_runtime.planning.encoder_memory import encoder_activation_bytes, encoder_weight_bytes
from edge_runtime.planning.ranges import Range

# Of the speed of few rows with quantized weights: a batch of rows computes each in this share of the time at best (as a prefill), and float
# weights, which encoders have, take longer at worst.
_FASTER, _SLOWER = 0.4, 4.0


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """An image of `rows` soft rows: seconds of the encode phase and of the prefill, joules of both (None: the watts are not known).

    `encoder_bytes` are those of the loaded encoder and of its activations, which are taken at the first image.
    """

    rows: int
    encode_seconds: Range
    prefill_seconds: Range
    joules: Range | None
    encoder_bytes: int
    derived: str


def image_plan(manifest: Manifest, operations: Range, prefill: Range, power: PhasePower | None) -> ImagePlan | None:
    """Returns the plan of an image; None for a bundle without an encoder in GGUF, or made before its sizes were noted.

    `operations` are those per second of a forward of few rows, `prefill` is in rows per second.
    """
    media = manifest.media
    if media is None or media.vision is None or not any(file.role == MEDIA_ENCODER for file in manifest.files):
        return None
    rows = DEFAULT_BUDGET
    needed = image_operations(media.vision, manifest.architecture.hidden_size, rows)
    encode = Range.between(needed * _FASTER / operations.high, needed * _SLOWER / operations.low)
    filled = Range(low=rows / prefill.high, middle=rows / prefill.middle, high=rows / prefill.low)
    return ImagePlan(
        rows=rows,
        encode_seconds=encode,
        prefill_seconds=filled,
        joules=encode.plus(filled).times(power.forward(rows)) if power is not None else None,
        encoder_bytes=encoder_weight_bytes(manifest) + encoder_activation_bytes(manifest, "image", rows),
        derived=f"estimated: {needed / 1e9:.3g} G operations of the encoder at {_FASTER:g} to {_SLOWER:g} times the seconds of few rows,"
        f" then the prefill of {rows} rows; joules are "
        + ("these seconds x the watts of a verify" if power else "not known without watts"),
    )


def image_operations(vision: VisionSize, text_size: int, rows: int) -> float:
    """Returns the operations of the encoder for an image of `rows` soft rows."""
    size, out = vision.hidden_size, 2.0 * rows * vision.hidden_size * text_size
    if vision.layers is None or vision.feed_forward_size is None:
        return out + 2.0 * rows * 3 * SIDE**2 * size
    patches = rows * POOLING**2
    layer = 2.0 * patches * (4 * size**2 + 3 * size * vision.feed_forward_size) + 4.0 * patches**2 * size
    return out + 2.0 * patches * 3 * PATCH**2 * size + vision.layers * layer
