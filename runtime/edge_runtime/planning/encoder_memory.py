"""How much memory the encoder of images and sound takes, and the check that it fits before it is loaded at its first use.

Weights: libmtmd copies its file into memory; onnxruntime computes float16 weights as float32. Activations are estimated from the towers'
sizes, as measured (docs/media.md): they stay allocated for the largest media so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from edge_devices.machine.memory import byte_text
from edge_runtime.bundle.manifest import AUDIO_ENCODER, MEDIA_ENCODER, VISION_ENCODER, Manifest
from edge_runtime.errors import RequestError
from edge_runtime.media.image import POOLING, Image
from edge_runtime.media.soft_rows import Media, row_count

_FLOAT = 4
# Float32 vectors of a patch that live at once: of the feed-forward's width, and of the tower's.
_WIDE_VECTORS, _VECTORS = 3, 10
# Of the audio tower's first convolutions, whose shapes every member has, per soft row.
_SOUND_ROW_BYTES = 160_000
_GROWTH = {"f16": 2.0}
Kind = Literal["image", "sound"]


def encoder_weight_bytes(manifest: Manifest, kind: Kind | None = None) -> int:
    """Returns the bytes of the loaded weights that encode an image or a sound; None: of the one GGUF file that holds both encoders."""
    if kind is None:
        return sum(file.bytes for file in manifest.files if file.role == MEDIA_ENCODER)
    role = {"image": VISION_ENCODER, "sound": AUDIO_ENCODER}[kind]
    files = [file for file in manifest.files if file.role.removesuffix("_data") == role]
    return int(sum(file.bytes * _GROWTH.get(file.quantization or "", 1.0) for file in files))


def encoder_activation_bytes(manifest: Manifest, kind: Kind, rows: int) -> int:
    """Returns the bytes of activations for an image or a sound of so many soft rows; 0 where a projection takes the tower's place."""
    inputs = manifest.media
    if inputs is None:
        return 0
    if kind == "sound":
        return 0 if inputs.samples_per_row is not None else rows * _SOUND_ROW_BYTES
    size = inputs.vision
    if size is None or size.feed_forward_size is None:
        return 0
    return rows * POOLING**2 * _FLOAT * (_WIDE_VECTORS * size.feed_forward_size + _VECTORS * size.hidden_size)


class EncoderMemory:
    """What a session's encoder has taken, and whether the next media fits.

    `one_file` holds the encoders of images and of sound; otherwise each is loaded when it is needed. `limit` is for the whole process, of
    which the bundle takes `beside`; without one, `available` says what is free.
    """

    def __init__(
        self,
        manifest: Manifest,
        available: Callable[[], int | None],
        *,
        one_file: bool,
        limit: int | None = None,
        beside: int = 0,
    ) -> None:
        self._manifest, self._one_file, self._available = manifest, one_file, available
        self._limit, self._beside = limit, beside
        self._weights: dict[Kind | None, int] = {}
        self._activations = 0

    def admit(self, media: Media) -> None:
        """Counts an image or a sound that is to be encoded. Raises RequestError if there is no memory for it."""
        inputs = self._manifest.media
        assert inputs is not None  # media come with their inputs
        kind: Kind = "image" if isinstance(media, Image) else "sound"
        loaded = None if self._one_file else kind
        weights = self._weights | {loaded: encoder_weight_bytes(self._manifest, loaded)}
        activations = max(self._activations, encoder_activation_bytes(self._manifest, kind, row_count(media, inputs)))
        total = sum(weights.values()) + activations
        needed, fits, where = self._bounds(total)
        if fits is not None and needed > fits:
            raise RequestError(
                f"the encoder needs {byte_text(needed)} of memory for this {kind}, but {where}; ask for less detail, free some memory,"
                f" or leave the {kind} out"
            )
        self._weights, self._activations = weights, activations

    def forget(self) -> None:
        self._weights, self._activations = {}, 0

    def _bounds(self, total: int) -> tuple[int, int | None, str]:
        """Returns the bytes needed, those there are, and a clause about them."""
        if self._limit is not None:
            return (
                total,
                self._limit - self._beside,
                f"the limit of {byte_text(self._limit)} leaves {byte_text(max(0, self._limit - self._beside))}",
            )
        used, available = sum(self._weights.values()) + self._activations, self._available()
        return total - used, available, "" if available is None else f"{byte_text(available)} are available"
