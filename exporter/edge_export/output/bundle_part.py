"""One file that an export wrote, on its way into the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class BundlePart:
    """A written file: its role and format as in the manifest, and the name of its quantization if it holds weights."""

    role: str
    path: Path
    format: str
    quantization: str | None = None
