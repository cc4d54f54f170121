"""Tiny checkpoints, written once per run and only when asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def member_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function from a name in tiny_members.MEMBERS to the folder of its checkpoint; treat the folder as read-only."""
    pytest.importorskip("torch", reason="tiny checkpoints are made with torch")
    pytest.importorskip("transformers", reason="tiny checkpoints are made with transformers")
    pytest.importorskip("safetensors", reason="tiny checkpoints are made with safetensors")
    from tiny_members import write_member

    root = tmp_path_factory.mktemp("members")

    def folder_of(name: str) -> Path:
        folder = root / name
        return folder if folder.is_dir() else write_member(name, folder)

    return folder_of
