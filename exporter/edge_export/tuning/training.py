"""Trains a drafter on texts that its target wrote, for a number of minutes, with a state on the disk to go on from.

Imports torch: import it only where a drafter is trained.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from edge_export.errors import ExportError
from edge_export.tuning.texts import Tokens
from edge_export.tuning.unrolled import Segment, distillation_loss, target_rows

STATE_NAME = "training.safetensors"
# What AdamW keeps of a weight.
_SUMS = ("step", "exp_avg", "exp_avg_sq")
SAVE_SECONDS = 30.0
# Logits of a training step: they are held several times over.
MAX_LOGITS = 16 << 20
_WARM_UP = 0.05


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a drafter is tuned. The learning rate follows the share of `minutes` that is used, so that a slow machine takes fewer steps."""

    minutes: float = 10.0
    draft_steps: int = 4
    batch: int = 8
    rate: float = 1e-3
    seed: int = 20261122


@dataclass(frozen=True, kw_only=True)
class State:
    """How far a training is."""

    steps: int = 0
    seconds: float = 0.0


def train(target: Any, drafter: Any, texts: Tokens, recipe: Recipe, folder: Path, until: float = 1.0) -> State:
    """Trains `drafter` in place on texts [N, T] for the share `until` of the recipe's minutes.

    Goes on from the state in `folder`, if there is one. Raises ExportError if the loss becomes no number.
    """
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.0)
    state = _restored(folder, drafter, optimizer)
    seconds = 60 * recipe.minutes
    begin = saved = time.monotonic()
    used = state.seconds
    drafter.train()
    while state.seconds < seconds * until:
        progress = state.seconds / seconds
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate * min(progress / _WARM_UP + 0.05, 1.0, 1.0 - progress)
        _step(target, drafter, optimizer, texts, recipe, state.steps)
        now = time.monotonic()
        state = State(steps=state.steps + 1, seconds=used + now - begin)
        if now - saved > SAVE_SECONDS:
            _save(folder, drafter, optimizer, state)
            saved = now
    _save(folder, drafter, optimizer, state)
    drafter.eval()
    return state


def _step(target: Any, drafter: Any, optimizer: Any, texts: Tokens, recipe: Recipe, step: int) -> None:
    random = np.random.default_rng((recipe.seed, step))
    tokens = torch.from_numpy(texts[random.integers(len(texts), size=recipe.batch)])
    segment = _segment(tokens.shape[1], target.config.get_text_config().vocab_size, recipe, random)
    loss = distillation_loss(drafter, target_rows(target, tokens, segment), segment)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    value = float(loss.detach())
    if not np.isfinite(value):
        raise ExportError(f"tuning the drafter failed: its loss became {value} in step {step}; the pair or the text is unusable")


def _segment(length: int, vocabulary: int, recipe: Recipe, random: np.random.Generator) -> Segment:
    """All positions of a text, or as many as have room for their logits."""
    positions = length - recipe.draft_steps
    count = min(positions, max(8, MAX_LOGITS // (vocabulary * recipe.batch)))
    return Segment(first=1 + int(random.integers(positions - count + 1)), count=count, steps=recipe.draft_steps)


def _save(folder: Path, drafter: Any, optimizer: Any, state: State) -> None:
    tensors = {}
    for name, weight in drafter.named_parameters():
        tensors[name] = weight.detach()
        tensors |= {f"{key} {name}": optimizer.state[weight][key] for key in _SUMS if weight in optimizer.state}
    temporary = folder / f"{STATE_NAME}.new"
    save_file(tensors, temporary, metadata={"steps": str(state.steps), "seconds": str(state.seconds)})
    temporary.replace(folder / STATE_NAME)


def _restored(folder: Path, drafter: Any, optimizer: Any) -> State:
    path = folder / STATE_NAME
    if not path.is_file():
        return State()
    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            names = set(file.keys())
            for name, weight in drafter.named_parameters():
                weight.copy_(file.get_tensor(name))
                if f"{_SUMS[0]} {name}" in names:
                    optimizer.state[weight] = {key: file.get_tensor(f"{key} {name}") for key in _SUMS}
            metadata = file.metadata()
        return State(steps=int(metadata["steps"]), seconds=float(metadata["seconds"]))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ExportError(f"{path} cannot be read ({error}); remove {folder} to tune from the beginning") from error
