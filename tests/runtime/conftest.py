"""The reference pair as GGUF files, made once per run by the exporter's own writer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

import edge_export


@dataclass(frozen=True, kw_only=True)
class ReferencePair:
    """Folders of the two checkpoints, the float16 GGUF files made from them, and the split drafter's two files."""

    target_checkpoint: Path
    drafter_checkpoint: Path
    target: Path
    drafter: Path
    body: Path
    head: Path


@pytest.fixture(scope="session")
def reference_pair(tmp_path_factory: pytest.TempPathFactory) -> ReferencePair:
    source = Path(edge_export.__file__).parent / "reference_pair"
    if not source.is_dir():
        pytest.skip(f"the reference pair is not in {source}")
    pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
    pytest.importorskip("gguf", reason="needs edge-mtp[export]")
    from edge_export.checkpoint.checkpoint import open_checkpoint
    from edge_export.gguf.split_drafter import write_body, write_head
    from edge_export.gguf.writer import write_gguf

    folder = tmp_path_factory.mktemp("reference_pair")
    for role in ("target", "drafter"):
        write_gguf(open_checkpoint(source / role), folder / f"{role}.gguf", "f16", lambda _: None, tokenizer_folder=source / "target")
    drafter = open_checkpoint(source / "drafter")
    write_body(drafter, folder / "drafter.gguf", folder / "body.gguf")
    write_head(drafter, folder / "drafter.gguf", folder / "head.gguf")
    return ReferencePair(
        target_checkpoint=source / "target",
        drafter_checkpoint=source / "drafter",
        target=folder / "target.gguf",
        drafter=folder / "drafter.gguf",
        body=folder / "body.gguf",
        head=folder / "head.gguf",
    )
