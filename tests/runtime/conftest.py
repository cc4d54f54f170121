"""The reference pair as files: its checkpoints, and the float16 GGUF files of its bundle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from edge_runtime.bundle.bundle import open_bundle
from kept import PAIR


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Folders of the two checkpoints, the float16 GGUF files made from them, and the file of the drafter's sparse head."""

    target_checkpoint: Path
    drafter_checkpoint: Path
    target: Path
    drafter: Path
    head: Path


@pytest.fixture(scope="session")
def reference_pair(exported_pair: Path) -> Reference:
    path = open_bundle(exported_pair).path
    files = {"target": path("target"), "drafter": path("drafter"), "head": path("drafter_head")}
    return Reference(target_checkpoint=PAIR / "target", drafter_checkpoint=PAIR / "drafter", **files)
