"""Decodes and resizes images. The only module that imports Pillow; it runs in a child process, since files are hostile."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np

from edge_runtime.errors import BackendError, RequestError
from edge_runtime.media.formats import IMAGE_FORMATS, MAX_PIXELS
from edge_runtime.media.image import Image, final_size

INSTALL = "pip install 'edge-mtp[media]'"


def decode_image(data: bytes, budget: int) -> Image:
    """Returns the image in its final size: turned as EXIF asks, transparency on white, the first frame of an animation.

    Raises RequestError for a file that is damaged or too large, BackendError without Pillow.
    """
    try:
        from PIL import Image as pillow
        from PIL import ImageOps
    except ImportError as error:
        raise BackendError(f"Pillow, which decodes images, is not installed ({error}); run: {INSTALL}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pillow.open(io.BytesIO(data), formats=IMAGE_FORMATS) as opened:
                _check_size(*opened.size)
                opened.load()
                rgb = _on_white(pillow, ImageOps.exif_transpose(opened))
                height, width = final_size(rgb.height, rgb.width, budget)
                resized = rgb if (rgb.height, rgb.width) == (height, width) else rgb.resize((width, height), pillow.Resampling.BICUBIC)
                return Image(np.array(resized))
    except RequestError:
        raise
    except Exception as error:
        # Pillow's decoders raise almost anything for damaged files: SyntaxError, struct.error, IndexError, MemoryError.
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise RequestError(f"the image is damaged ({reason}); save it again") from error


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise RequestError(f"the image has {width} x {height} pixels, at most {MAX_PIXELS / 1e6:.0f} million are allowed; reduce it")
    if width < 1 or height < 1:
        raise RequestError(f"the image has {width} x {height} pixels; save it again")


def _on_white(pillow: Any, image: Any) -> Any:
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return pillow.alpha_composite(pillow.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")
