"""One timed request about an image that was not encoded before, for the predictions and the benchmark of images."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edge_runtime.media.image import SIDE, Image
from edge_runtime.session.session import Session

QUESTION = "What is this?"


@dataclass(frozen=True, kw_only=True)
class ImageTiming:
    """Seconds of the phases of a request about an image of `rows` soft rows, up to its first token."""

    rows: int
    encode_seconds: float
    prefill_seconds: float
    decode_seconds: float
    prompt_tokens: int
    tokens: int


def square(budget: int, seed: int) -> Image:
    """Returns a square image of noise within the budget; each seed is another image, whose rows are not kept from earlier."""
    side = SIDE * math.isqrt(budget)
    return Image(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def time_image(session: Session, image: Image) -> ImageTiming:
    """Runs the request; the first of a session loads the encoder too."""
    generation = session.generate(session.media_prompt(QUESTION, [image]), max_tokens=1, draft_length=0)
    for _ in generation.rounds():
        pass
    stats = generation.stats
    return ImageTiming(
        rows=stats.media_rows,
        encode_seconds=stats.encode_seconds,
        prefill_seconds=stats.prefill_seconds - stats.encode_seconds,
        decode_seconds=stats.decode_seconds,
        prompt_tokens=stats.prompt_tokens,
        tokens=stats.tokens,
    )
