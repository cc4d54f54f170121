"""The picture pair in tests/data, which names the digits and colours of pictures drawn here, as a bundle of both formats."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_runtime.media.encoder_inputs import Image
from kept import shipped_bundle

PAIR = Path(__file__).parents[1] / "data" / "pictures"
# The side of a square picture with the smallest budget of soft rows, 8 x 8 of them, and of a dot of a digit.
SIDE, CELL = 384, 48
DIGITS = {
    "zero": "01110 10001 10011 10101 11001 10001 01110",
    "one": "00100 01100 00100 00100 00100 00100 01110",
    "four": "00010 00110 01010 10010 11111 00010 00010",
    "seven": "11111 00001 00010 00100 01000 01000 01000",
}
COLOURS = {
    "black": (20, 20, 20),
    "white": (240, 240, 240),
    "red": (210, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 60, 210),
    "yellow": (240, 220, 40),
}


@dataclass(frozen=True)
class Scene:
    """A digit in one colour on another."""

    digit: str
    colour: str
    ground: str

    @property
    def words(self) -> str:
        """The scene in words, for prompts without a picture."""
        return f"There is a {self.colour} {self.digit} on {self.ground}. "


SCENES = [Scene("one", "red", "white"), Scene("seven", "yellow", "blue"), Scene("four", "black", "green"), Scene("zero", "white", "red")]


def draw(scene: Scene) -> Image:
    dots = np.array([[dot == "1" for dot in row] for row in DIGITS[scene.digit].split()])
    top, left = ((SIDE - CELL * count) // 2 for count in dots.shape)
    pixels = np.full((SIDE, SIDE, 3), COLOURS[scene.ground], np.uint8)
    pixels[top : SIDE - top, left : SIDE - left][np.kron(dots, np.ones((CELL, CELL))) == 1] = COLOURS[scene.colour]
    return Image(pixels)


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
    return [word for word in text.replace(",", " ").replace(".", " ").split() if word in COLOURS]
