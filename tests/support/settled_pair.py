"""Tiny pairs whose logits do not amplify rounding, for tests of parity. Plain random pairs do, trained ones do not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kept import kept


def settled(folder_of: Callable[[str], Path], name: str) -> Path:
    """Returns a copy of the member `name` with unit norms and matrices of variance 1 / fan-in; made once, read-only."""

    def make(folder: Path) -> None:
        shutil.copytree(folder_of(name), folder)
        settle(folder)

    return kept("settled", {"name": name}, make)


def settle(folder: Path) -> None:
    """Gives a checkpoint unit norms and matrices of variance 1 / fan-in, in place."""
    from safetensors.torch import load_file, save_file

    for path in folder.glob("*.safetensors"):
        tensors = {key: _settle(key, tensor) for key, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})


def _settle(name: str, tensor: Any) -> Any:
    import torch

    if not tensor.is_floating_point():
        return tensor
    if tensor.dim() < 2:
        # Queries and keys of unit variance in their dot product: the attention scale is 1.
        return torch.full_like(tensor, tensor.numel() ** -0.25 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0)
    return (tensor * tensor.shape[-1] ** -0.5).contiguous()
