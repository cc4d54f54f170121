"""Compares the soft rows of exported encoders with transformers' in float32: of images of noise and, if there is sound, a second of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_export.errors import ParityError
from edge_export.parity.comparison import demand
from edge_export.parity.reference import SEED, inference, load_reference
from edge_runtime.bundle.manifest import MediaInputs
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.media.image import SIDE, Image
from edge_runtime.media.soft_rows import Media
from edge_runtime.media.sound import RATE, Sound

Rows = NDArray[np.float32]
# Sides in soft rows.
_SIDES = ((2, 3), (7, 9))


@dataclass(frozen=True, kw_only=True)
class MediaParityRequest:
    """What is compared: `encode` runs the exported encoder. `most` is the largest distance allowed, as a share of the rows' norm."""

    target_folder: Path
    threads: int
    inputs: MediaInputs
    quantization: str
    encode: Callable[[Sequence[Media]], list[Rows]]
    most: float


def measure_media_parity(request: MediaParityRequest) -> dict[str, Any]:
    """Returns the figures for the manifest: the largest distance of an image's and of a sound's rows, as shares of their norm.

    Raises ParityError, naming the figure, the limit and --no-verify, if one is beyond the limit, or if the encoder does not run.
    """
    media = probes(sound=request.inputs.audio is not None)
    try:
        found = request.encode(media)
    except EdgeRuntimeError as error:
        raise ParityError(f"the encoder of images and sound does not run: {error}; correct that, or export with --no-verify") from error
    wanted = _reference_rows(request, media)
    distances = [distance(one, other) for one, other in zip(found, wanted, strict=True)]
    figures: dict[str, Any] = {"quantization": request.quantization, "limit": request.most}
    for kind, name in ((Image, "image_rows"), (Sound, "sound_rows")):
        of_kind = [value for value, one in zip(distances, media, strict=True) if isinstance(one, kind)]
        if of_kind:
            figures[name] = max(of_kind)
            demand(f"distance of {name.replace('_', ' ')} of the {request.quantization} encoder", figures[name], most=request.most)
    return figures


def probes(*, sound: bool) -> list[Media]:
    """Returns the images and the sound of one second that are compared."""
    random = np.random.default_rng(SEED)
    media: list[Media] = [Image(random.integers(0, 256, (SIDE * high, SIDE * wide, 3), dtype=np.uint8)) for high, wide in _SIDES]
    return [*media, Sound(random.uniform(-0.5, 0.5, RATE).astype(np.float32))] if sound else media


def distance(found: Rows, wanted: Rows) -> float:
    """Returns the norm of the difference as a share of `wanted`'s; infinite for rows of another shape."""
    if found.shape != wanted.shape:
        return float("inf")
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def _reference_rows(request: MediaParityRequest, media: Sequence[Media]) -> list[Rows]:
    with inference(request.threads):
        model = load_reference(request.target_folder).model
        return [_rows_of(model, each, request.inputs) for each in media]


def _rows_of(model: Any, media: Media, inputs: MediaInputs) -> Rows:
    """transformers' rows [rows, hidden size] of an image or a sound."""
    import torch

    if isinstance(media, Image):
        tower = inputs.vision is None or inputs.vision.layers is not None
        patches, positions = (media.patches(), media.positions()) if tower else _blocks(media)
        found = model.get_image_features(torch.from_numpy(patches)[None], torch.from_numpy(positions)[None])
    elif inputs.samples_per_row is None:
        mels = torch.from_numpy(media.mel_frames())[None]
        found = model.get_audio_features(mels, torch.ones(mels.shape[:2], dtype=torch.bool))
    else:
        frames = np.zeros((-(-len(media.samples) // inputs.samples_per_row), inputs.samples_per_row), np.float32)
        frames.ravel()[: len(media.samples)] = media.samples
        found = model.get_audio_features(torch.from_numpy(frames)[None])
    rows = found.pooler_output
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
