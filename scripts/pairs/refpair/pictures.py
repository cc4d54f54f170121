"""Synthetic pictures of coloured digits, and questions about them: the whole world of the picture pair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edge_runtime.media.encoder_inputs import Image

# The side of a square picture with the smallest budget of soft rows, 8 x 8 of them.
SIDE = 384
CELL = 48
DIGITS = {
    "zero": "01110 10001 10011 10101 11001 10001 01110",
    "one": "00100 01100 00100 00100 00100 00100 01110",
    "two": "01110 10001 00001 00110 01000 10000 11111",
    "three": "11110 00001 00001 01110 00001 00001 11110",
    "four": "00010 00110 01010 10010 11111 00010 00010",
    "five": "11111 10000 11110 00001 00001 10001 01110",
    "six": "00110 01000 10000 11110 10001 10001 01110",
    "seven": "11111 00001 00010 00100 01000 01000 01000",
    "eight": "01110 10001 10001 01110 10001 10001 01110",
    "nine": "01110 10001 10001 01111 00001 00010 01100",
}
COLOURS = {
    "black": (20, 20, 20),
    "white": (240, 240, 240),
    "red": (210, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 60, 210),
    "yellow": (240, 220, 40),
}
# The tokens of images and sound, behind those of the reference pair's tokenizer.
MEDIA_TOKENS = {
    "<|image>": "boi_token_id",
    "<|image|>": "image_token_id",
    "<image|>": "eoi_token_id",
    "<|audio>": "boa_token_id",
    "<|audio|>": "audio_token_id",
    "<audio|>": "eoa_token_index",
}
# How far a digit is from the middle, at most, in pixels.
_SHIFT = 8


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

    def answers(self) -> dict[str, str]:
        """Returns the answers by question."""
        return {
            "What is this?": f"The picture shows the digit {self.digit}. It is {self.colour}, and it stands on a {self.ground} ground.",
            "Which digit is it?": f"It is the digit {self.digit}.",
            "What colour is it?": f"The digit is {self.colour}, and the ground is {self.ground}.",
        }


def random_scene(random: np.random.Generator) -> Scene:
    """Returns a scene of two different colours."""
    colour, ground = random.choice(list(COLOURS), 2, replace=False)
    return Scene(str(random.choice(list(DIGITS))), str(colour), str(ground))


def draw(scene: Scene, random: np.random.Generator | None = None) -> Image:
    """Draws a scene; with `random` a little aside, in slightly other colours, and with noise."""
    shift, off, noise = np.zeros(2, int), np.zeros((2, 3)), np.zeros((SIDE, SIDE, 1))
    if random is not None:
        shift = random.integers(-_SHIFT, _SHIFT + 1, 2)
        off, noise = random.uniform(-14, 14, (2, 3)), random.normal(0, 4, (SIDE, SIDE, 1))
    pixels = np.empty((SIDE, SIDE, 3))
    pixels[:] = np.array(COLOURS[scene.ground]) + off[0]
    rows = DIGITS[scene.digit].split()
    top, left = (SIDE - 7 * CELL) // 2 + shift[0], (SIDE - 5 * CELL) // 2 + shift[1]
    for y, row in enumerate(rows):
        for x, dot in enumerate(row):
            if dot == "1":
                area = np.s_[top + y * CELL : top + (y + 1) * CELL, left + x * CELL : left + (x + 1) * CELL]
                pixels[area] = np.array(COLOURS[scene.colour]) + off[1]
    return Image(np.clip(pixels + noise, 0, 255).astype(np.uint8))


@dataclass(frozen=True)
class Example:
    """Token ids of a question and its answer, of which the last `answer` are the answer's; `image` is None for a scene in words."""

    ids: list[int]
    answer: int
    image: Image | None


def labels(scene: Scene) -> list[int]:
    """Returns the numbers of the digit, its colour and the ground's."""
    return [list(DIGITS).index(scene.digit), list(COLOURS).index(scene.colour), list(COLOURS).index(scene.ground)]


def example(tokenizer: Tokenizer, scene: Scene, question: str, image: Image | None) -> Example:
    """A turn of the user, with a picture or in words, and the model's."""
    answer = tokenizer.encode(scene.answers()[question] + "<turn|>\n", add_special_tokens=False).ids
    if image is None:
        asked = tokenizer.encode(f"<bos><|turn>user\n{scene.words}{question}<turn|>\n<|turn>model\n", add_special_tokens=False).ids
        return Example([*asked, *answer], len(answer), None)
    begin, place, end = (tokenizer.token_to_id(token) for token in list(MEDIA_TOKENS)[:3])
    before = tokenizer.encode("<bos><|turn>user\n", add_special_tokens=False).ids
    after = tokenizer.encode(f"{question}<turn|>\n<|turn>model\n", add_special_tokens=False).ids
    return Example([*before, begin, *[place] * image.rows, end, *after, *answer], len(answer), image)


@dataclass(frozen=True)
class Batch:
    """Ids [B, T], filled up with 0 behind the answers; whether each is one of an answer [B, T]; pictures or None.

    `labels` [B, 3] are the numbers of the digit and of the two colours.
    """

    ids: NDArray[np.int64]
    answers: NDArray[np.bool_]
    labels: NDArray[np.int64]
    patches: NDArray[np.float32] | None
    positions: NDArray[np.int64] | None


def batches(tokenizer: Tokenizer, size: int, length: dict[bool, int], seed: int) -> Iterator[Batch]:
    """Yields batches, two of three with pictures; `length` by whether there are pictures."""
    random = np.random.default_rng(seed)
    number = 0
    while True:
        pictured = number % 3 != 2
        number += 1
        examples, numbers = [], []
        for _ in range(size):
            scene = random_scene(random)
            numbers.append(labels(scene))
            question = str(random.choice(list(scene.answers()), p=[0.6, 0.2, 0.2]))
            examples.append(example(tokenizer, scene, question, draw(scene, random) if pictured else None))
        ids, answers = np.zeros((size, length[pictured]), np.int64), np.zeros((size, length[pictured]), bool)
        for row, each in enumerate(examples):
            ids[row, : len(each.ids)] = each.ids
            answers[row, len(each.ids) - each.answer : len(each.ids)] = True
        images = [each.image for each in examples if each.image is not None]
        patches = np.stack([image.patches() for image in images]) if images else None
        positions = np.stack([image.positions() for image in images]) if images else None
        yield Batch(ids, answers, np.array(numbers), patches, positions)
