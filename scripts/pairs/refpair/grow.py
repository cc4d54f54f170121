"""A tokenizer with more pieces than were learned, as Gemma's has: `<unused0>`, `<unused1>`, ... up to any size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def write_grown_tokenizer(source: Path, output: Path, vocabulary: int) -> None:
    """Copies the tokenizer files of a checkpoint folder, filled up with unused pieces to `vocabulary`."""
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    pieces = tokenizer["model"]["vocab"]
    pieces |= {f"<unused{i}>": i for i in range(len(pieces), vocabulary)}
    (output / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, output / name)
