"""The towers that ONNX graphs can have: those of E2B and E4B."""

from __future__ import annotations

from edge_export.checkpoint.media_architecture import AudioTower, MediaArchitecture, VisionTower
from edge_export.errors import ExportError


def check_towers(media: MediaArchitecture) -> tuple[VisionTower, AudioTower | None]:
    """Returns the towers of E2B or E4B. Raises ExportError for those of a larger member.

    onnxruntime's GroupQueryAttention lets a row attend to earlier rows only.
    """
    vision, audio = media.vision, media.audio
    if media.bidirectional or not isinstance(vision, VisionTower) or vision.standardized or not isinstance(audio, AudioTower | None):
        raise ExportError(
            "ONNX graphs take images and sound of E2B and E4B only, and this is a larger member; export --format gguf, or leave --media out"
        )
    return vision, audio
