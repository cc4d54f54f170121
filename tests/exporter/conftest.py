"""Tiny checkpoints, written once and only when asked for."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

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


@pytest.fixture
def copy(member_folder: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Returns a function from a member's name to a copy of its folder that the test may damage."""
    return lambda name: Path(shutil.copytree(member_folder(name), tmp_path / name, dirs_exist_ok=True))


@pytest.fixture
def disk_with() -> Callable[[int], AbstractContextManager[None]]:
    """Returns a context in which every disk has so many bytes free."""

    @contextmanager
    def disk(free: int) -> Iterator[None]:
        usage = shutil.disk_usage("/")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
            yield

    return disk


@pytest.fixture
def memory_of() -> Callable[[int | None], AbstractContextManager[None]]:
    """Returns a context in which the machine has so many bytes of memory available; None: nobody knows."""
    from edge_export.parity import reference

    @contextmanager
    def memory(available: int | None) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "available_memory_bytes", lambda: available)
            yield

    return memory


@pytest.fixture
def few_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter's confidence is measured on a few tokens: of random members nearly no draft is accepted, so each token is a round."""
    from edge_export.parity import comparison

    monkeypatch.setattr(comparison, "WRITTEN", 12)


@pytest.fixture
def pair(member_folder: Callable[[str], Path]) -> list[Path]:
    """The folders of a tiny target with per-layer embeddings and of its drafter."""
    return [member_folder("e2b"), member_folder("e2b-assistant")]


@pytest.fixture
def export(pair: list[Path], tmp_path: Path) -> Callable[..., Any]:
    """Exports the tiny pair to `out`, with other values of the request, and returns the bundle."""
    from edge_export.pipeline.export import export_pair
    from edge_export.pipeline.request import ExportRequest

    def made(progress: Any = None, **changes: Any) -> Any:
        values: dict[str, Any] = {
            "target": str(pair[0]),
            "drafter": str(pair[1]),
            "output": tmp_path / "out",
            "verify": False,
            "threads": 1,
        }
        return export_pair(ExportRequest(**values | {"target_quantization": "f16", "drafter_quantization": "bf16"} | changes), progress)

    return made
