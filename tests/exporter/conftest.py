"""Tiny checkpoints, written once and only when asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from kept import kept


@pytest.fixture(scope="session")
def member_folder() -> Callable[[str], Path]:
    """Returns a function from a name in tiny_members.MEMBERS to the folder of its checkpoint; treat the folder as read-only."""
    for library in ("torch", "transformers", "safetensors"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"tiny checkpoints are made with {library}")
    from tiny_members import write_member

    return lambda name: kept("member", {"name": name}, lambda folder: write_member(name, folder))
