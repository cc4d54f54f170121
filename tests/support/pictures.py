"""The picture pair in tests/data, which names what scripts/pairs/refpair/pictures.py draws, as a bundle of both formats."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from kept import shipped_bundle

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "tests" / "data" / "pictures"
if str(ROOT / "scripts" / "pairs") not in sys.path:
    sys.path.append(str(ROOT / "scripts" / "pairs"))

from refpair.pictures import Scene, draw

SCENES = [Scene("one", "red", "white"), Scene("seven", "yellow", "blue"), Scene("four", "black", "green"), Scene("zero", "white", "red")]


def picture_bundle() -> Path:
    """Returns the folder of the bundle, which is exported once."""
    from edge_export.onnx.request import OnnxRequest

    return shipped_bundle(
        target=str(PAIR / "target"),
        drafter=str(PAIR / "drafter"),
        target_quantization="f16",
        drafter_quantization="f16",
        onnx=OnnxRequest(target="f32", drafter="f32"),
        context=512,
        media="f16",
    )


def photo(scene: Scene, kind: str = "PNG") -> bytes:
    """Returns the picture of a scene as a file, smaller than it will be shown."""
    import PIL.Image

    file = io.BytesIO()
    PIL.Image.fromarray(draw(scene).rgb).resize((240, 240)).save(file, kind)
    return file.getvalue()


def colours(text: str) -> list[str]:
    """Returns the colours that a text names, in order."""
    from refpair.pictures import COLOURS

    return [word for word in text.replace(",", " ").replace(".", " ").split() if word in COLOURS]
