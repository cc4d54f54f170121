"""A cache of packed weights for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime.backends.kernels.packed_cache import PackedCache
from polling import packed_weights_written


@pytest.fixture
def said() -> list[str]:
    """What the cache says."""
    return []


@pytest.fixture
def cache(tmp_path: Path, said: list[str]) -> Iterator[PackedCache]:
    yield PackedCache(tmp_path / "packed", said.append)
    packed_weights_written()
