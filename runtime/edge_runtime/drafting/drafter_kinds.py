"""The kinds of drafter."""

from __future__ import annotations

from typing import Literal, get_args

DrafterKind = Literal["dense", "split", "lookup", "none"]
DRAFTER_KINDS: tuple[DrafterKind, ...] = get_args(DrafterKind)


def is_model(kind: DrafterKind | None) -> bool:
    """Whether a drafter of this kind is a model; None stands for the one that the backend takes."""
    return kind not in ("lookup", "none")
