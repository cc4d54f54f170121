"""The picture pair in tests/data, which names what scripts/pairs/refpair/pictures.py draws, as a bundle of both formats."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from silent import Silent

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "tests" / "data" / "pictures"
if str(ROOT / "scripts" / "pairs") not in sys.path:
    sys.path.append(str(ROOT / "scripts" / "pairs"))

from refpair.pictures import Scene, draw

SCENES = [Scene("one", "red", "white"), Scene("seven", "yellow", "blue"), Scene("four", "black", "green"), Scene("zero", "white", "red")]


def export_pictures(folder: Path) -> Path:
    """Writes the bundle into `folder` and returns its path."""
    from edge_export.onnx.request import OnnxRequest
    from edge_export.pipeline.export import export_pair
    from edge_export.pipeline.request import ExportRequest

    request = ExportRequest(
        target=str(PAIR / "target"),
        drafter=str(PAIR / "drafter"),
        output=folder / "pictures",
        target_quantization="f16",
        drafter_quantization="f16",
        onnx=OnnxRequest(target="f32", drafter="f32"),
        context=512,
        verify=False,
        media="f16",
    )
    export_pair(request, Silent())
    return folder / "pictures"


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
