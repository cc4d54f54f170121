"""Compares the soft rows of exported encoders with transformers' in float32: of images of noise and, if there is sound, a second of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_export.errors import ParityError
from edge_export.parity.comparison import demand
from edge_export.parity.reference import SEED, Reference, Rows, inference, load_reference
from edge_runtime.bundle.manifest import MediaInputs
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.media.image import SIDE, Image
from edge_runtime.media.soft_rows import Media
from edge_runtime.media.sound import RATE, Sound

# Sides in soft rows.
_SIDES = ((2, 3), (7, 9))


def measure_media_parity(
    reference: Reference, encode: Callable[[Sequence[Media]], list[Rows]], inputs: MediaInputs, *, quantization: str, limit: float
) -> dict[str, Any]:
    """Returns the figures for the manifest: the largest distance of an image's and of a sound's rows, as shares of their norm.

    `encode` runs the exported encoder, whose weights are of type `quantization`; `limit` is the largest distance allowed. Raises
    ParityError, naming the figure, the limit and --no-verify, if one is beyond the limit, or if the encoder does not run.
    """
    media = probes(sound=inputs.audio is not None)
    try:
        exported = encode(media)
    except EdgeRuntimeError as error:
        raise ParityError(f"the encoder of images and sound does not run: {error}; correct that, or export with --no-verify") from error
    with inference(reference.threads):
        model = load_reference(reference.target.path).model
        expected = [_rows_of(model, each, inputs) for each in media]
    distances = [distance(*rows) for rows in zip(exported, expected, strict=True)]
    figures: dict[str, Any] = {"quantization": quantization, "limit": limit}
    for kind, name in ((Image, "image_rows"), (Sound, "sound_rows")):
        of_kind = [value for value, each in zip(distances, media, strict=True) if isinstance(each, kind)]
        if of_kind:
            figures[name] = max(of_kind)
            demand(f"distance of {name.replace('_', ' ')} of the {quantization} encoder", figures[name], maximum=limit)
    return figures


def probes(*, sound: bool) -> list[Media]:
    """Returns the images and the sound of one second that are compared."""
    random = np.random.default_rng(SEED)
    media: list[Media] = [Image(random.integers(0, 256, (SIDE * high, SIDE * wide, 3), dtype=np.uint8)) for high, wide in _SIDES]
    return [*media, Sound(random.uniform(-0.5, 0.5, RATE).astype(np.float32))] if sound else media


def distance(exported: Rows, expected: Rows) -> float:
    """Returns the norm of the difference as a share of `expected`'s; infinite for rows of another shape."""
    if exported.shape != expected.shape:
        return float("inf")
    return float(np.linalg.norm(exported - expected) / np.linalg.norm(expected))


def _rows_of(model: Any, media: Media, inputs: MediaInputs) -> Rows:
    """transformers' rows [rows, hidden size] of an image or a sound."""
    import torch

    if isinstance(media, Image):
        tower = inputs.vision is None or inputs.vision.layers is not None
        patches, positions = (media.patches(), media.positions()) if tower else _blocks(media)
        features = model.get_image_features(torch.from_numpy(patches)[None], torch.from_numpy(positions)[None])
    elif inputs.samples_per_row is None:
        mels = torch.from_numpy(media.mel_frames())[None]
        features = model.get_audio_features(mels, torch.ones(mels.shape[:2], dtype=torch.bool))
    else:
        frames = np.zeros((-(-len(media.samples) // inputs.samples_per_row), inputs.samples_per_row), np.float32)
        frames.ravel()[: len(media.samples)] = media.samples
        features = model.get_audio_features(torch.from_numpy(frames)[None])
    rows = features.pooler_output
    joined = torch.cat(list(rows)) if isinstance(rows, tuple | list) else rows.flatten(0, -2)
    made: Rows = joined.float().numpy()
    return made


def _blocks(image: Image) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """What the member without a tower takes: blocks of SIDE x SIDE pixels [rows, values], by row, column and colour, and their (x, y)."""
    high, wide = (side // SIDE for side in image.rgb.shape[:2])
    pixels = (image.rgb.astype(np.float32) / np.float32(255)).reshape(high, SIDE, wide, SIDE, 3).transpose(0, 2, 1, 3, 4)
    y, x = np.divmod(np.arange(high * wide), wide)
    blocks: NDArray[np.float32] = pixels.reshape(high * wide, -1)
    return blocks, np.stack([x, y], 1)
