"""Images as Gemma 4's vision encoder takes them: final sizes, soft rows, patches and their positions.

Source of the rules: transformers, models/gemma4/image_processing_pil_gemma4.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_runtime.errors import RequestError

PATCH = 16
POOLING = 3
# One soft row stands for this many pixels on a side.
SIDE = PATCH * POOLING
BUDGETS = (70, 140, 280, 560, 1120)
DEFAULT_BUDGET = 280


@dataclass(frozen=True, eq=False)
class Image:
    """A decoded image in its final size: `rgb` uint8 [height, width, 3], both sides multiples of `SIDE`."""

    rgb: NDArray[np.uint8]

    @property
    def rows(self) -> int:
        return self.rgb.size // (3 * SIDE**2)

    def patches(self) -> NDArray[np.float32]:
        """Returns the patches [height / 16 * width / 16, 768], values in [0, 1]; each is ordered by row, column and colour."""
        height, width = self.rgb.shape[0] // PATCH, self.rgb.shape[1] // PATCH
        grid = self.rgb.reshape(height, PATCH, width, PATCH, 3).transpose(0, 2, 1, 3, 4)
        return grid.reshape(height * width, PATCH * PATCH * 3) * np.float32(1 / 255)

    def positions(self) -> NDArray[np.int64]:
        """Returns x and y of each patch, [patches, 2]."""
        height, width = self.rgb.shape[0] // PATCH, self.rgb.shape[1] // PATCH
        y, x = np.divmod(np.arange(height * width), width)
        return np.stack([x, y], axis=1)


def check_budget(budget: int) -> None:
    """Raises RequestError for a budget that the processor does not have."""
    if budget not in BUDGETS:
        raise RequestError(f"an image cannot have {budget} soft rows; choose one of {', '.join(map(str, BUDGETS))}")


def final_size(height: int, width: int, budget: int = DEFAULT_BUDGET) -> tuple[int, int]:
    """Returns height and width after resizing, up or down: at most `budget` soft rows, nearly the same proportions.

    Raises RequestError for an image so long and narrow that it does not fit.
    """
    check_budget(budget)
    pixels = budget * SIDE**2
    factor = math.sqrt(pixels / (height * width))
    tall, wide = math.floor(factor * height / SIDE) * SIDE, math.floor(factor * width / SIDE) * SIDE
    if tall == 0 and wide > 0:
        tall, wide = SIDE, min(width // height, budget) * SIDE
    elif wide == 0 and tall > 0:
        tall, wide = min(height // width, budget) * SIDE, SIDE
    if not 0 < tall * wide <= pixels:
        raise RequestError(f"an image of {width} x {height} pixels does not fit {budget} soft rows; crop it")
    return tall, wide
