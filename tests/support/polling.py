"""Waiting for what another thread or process does: no test rests on how long that takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait(condition: Callable[[], Any], seconds: float = 120) -> bool:
    """Whether a condition holds within these seconds, which only a test that fails spends."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
