"""The reference pair as GGUF files, made once by the exporter's own writer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from kept import PAIR, kept


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Folders of the two checkpoints, the float16 GGUF files made from them, and the file of the drafter's sparse head."""

    target_checkpoint: Path
    drafter_checkpoint: Path
    target: Path
    drafter: Path
    head: Path


@pytest.fixture(scope="session")
def reference_pair() -> Reference:
    pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
    pytest.importorskip("gguf", reason="needs edge-mtp[export]")
    folder = kept("gguf", {}, _write_pair)
    return Reference(
        target_checkpoint=PAIR / "target",
        drafter_checkpoint=PAIR / "drafter",
        target=folder / "target.gguf",
        drafter=folder / "drafter.gguf",
        head=folder / "head.gguf",
    )


def _write_pair(folder: Path) -> None:
    from edge_export.checkpoint.checkpoint import open_checkpoint
    from edge_export.checkpoint.tokenizer_vocabulary import read_vocabulary
    from edge_export.gguf.writer import plan_gguf, write_head

    folder.mkdir()
    vocabulary = read_vocabulary(PAIR / "target")
    for role in ("target", "drafter"):
        plan_gguf(open_checkpoint(PAIR / role), "f16", vocabulary).write(folder / f"{role}.gguf", lambda _: None)
    drafter = open_checkpoint(PAIR / "drafter")
    write_head(drafter, folder / "drafter.gguf", folder / "head.gguf")
