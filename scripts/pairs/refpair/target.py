"""Trains the reference target: a small decoder of the exact Gemma 4 E2B family, in plain PyTorch over transformers' own model.

Every structural trait of E2B is there: per-layer embeddings, K/V-shared upper layers with a double-wide MLP, sliding and
full layers ending S,F, proportional partial RoPE and a larger head on full layers, tied embeddings, logit softcap 30.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import nn
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

LAYER_TYPES = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 3 + ["full_attention"]
QUICK_WINDOWS = 48


@dataclass(frozen=True, kw_only=True)
class TargetRecipe:
    """How the target is trained. `minutes` bounds the wall time: the learning rate follows the clock, not a step count."""

    minutes: float = 90.0
    hidden_size: int = 256
    intermediate_size: int = 512
    vocab_size: int = 4096
    short_length: int = 256
    sequence_length: int = 512
    batch_tokens: int = 4096
    long_share: float = 0.35
    muon_rate: float = 0.02
    adam_rate: float = 0.003
    warm_up: float = 0.02
    cool_down: float = 0.5
    weight_decay: float = 0.05
    seed: int = 20261121


def config_for(recipe: TargetRecipe) -> Gemma4TextConfig:
    """The E2B family at toy width: 8 layers, of which the last 4 reuse the K/V of layers 2 (sliding) and 3 (full)."""
    return Gemma4TextConfig(
        vocab_size=recipe.vocab_size,
        vocab_size_per_layer_input=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=len(LAYER_TYPES),
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        global_head_dim=128,
        hidden_size_per_layer_input=32,
        num_kv_shared_layers=4,
        use_double_wide_mlp=True,
        layer_types=list(LAYER_TYPES),
        sliding_window=128,
        final_logit_softcapping=30.0,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )


def initialise(model: nn.Module, seed: int) -> None:
    """Residual writers start at zero; query and key norms start where dot products have unit variance (scale is 1.0)."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            nn.init.constant_(weight, weight.numel() ** -0.25)
        elif weight.dim() < 2:
            nn.init.ones_(weight)
        elif name.endswith(("o_proj.weight", "down_proj.weight", "per_layer_projection.weight")):
            nn.init.zeros_(weight)
        elif "embed_tokens" in name:
            nn.init.normal_(weight, std=0.02, generator=generator)
        else:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=generator)


def optimizers_for(model: nn.Module, muon_rate: float, adam_rate: float, decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, Adam for embeddings and norms (Jordan et al. 2024, kellerjordan.github.io/posts/muon)."""
    matrices = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    muon = torch.optim.Muon(matrices, lr=muon_rate, weight_decay=decay, momentum=0.95, nesterov=True)
    adam = torch.optim.AdamW(rest, lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.0)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return [muon, adam]


def rate_at(progress: float, warm_up: float, cool_down: float) -> float:
    """Share of the peak rate at `progress` in [0, 1]: linear up, flat, linear down to 2%."""
    if progress < warm_up:
        return max(progress / warm_up, 0.02)
    return max(min(1.0, (1.0 - progress) / cool_down), 0.02)


def set_rates(optimizers: list[torch.optim.Optimizer], share: float) -> None:
    """Sets every group's rate to `share` of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share


def take_step(model: nn.Module, optimizers: list[torch.optim.Optimizer], loss: torch.Tensor, step: int) -> float:
    """One clipped optimizer step; returns the loss. Raises FloatingPointError when it is no number any more."""
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if not math.isfinite(value := loss.item()):
        raise FloatingPointError(f"the loss became {value} at step {step}: lower the rates")
    return value


def train_for(
    minutes: float,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    loss_of: Callable[[float], torch.Tensor],
    *,
    warm_up: float,
    cool_down: float,
    report: Callable[[dict[str, float]], None],
    keep: Callable[[int], None] = lambda _: None,
) -> int:
    """Takes steps for so long, their rates by the clock; returns their number. `loss_of` gets the share of the time that is over, `keep`
    the number of every 500th step."""
    started, step = time.monotonic(), 0
    while (progress := (time.monotonic() - started) / (60 * minutes)) < 1.0:
        set_rates(optimizers, rate_at(progress, warm_up, cool_down))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(progress)
        value = take_step(model, optimizers, loss, step)
        if step % 20 == 0:
            report({"step": step, "minutes": (time.monotonic() - started) / 60, "processor_s": time.process_time(), "loss": value})
        if step % 500 == 499:
            keep(step)
        step += 1
    model.eval()
    return step


def windows(tokens: np.ndarray, length: int, batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Yields int64 batches [batch, length + 1] at random offsets, each epoch a fresh permutation of the windows."""
    generator = np.random.default_rng(seed)
    while True:
        starts = np.arange(generator.integers(length), len(tokens) - length - 1, length)
        generator.shuffle(starts)
        for i in range(0, len(starts) - batch + 1, batch):
            yield torch.from_numpy(np.stack([tokens[s : s + length + 1] for s in starts[i : i + batch]]).astype(np.int64))


def next_token_loss(model: Gemma4ForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per token."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: Gemma4ForCausalLM, tokens: np.ndarray, length: int, max_windows: int | None = None) -> float:
    """Cross-entropy in nats per token over evenly spaced windows of held-out text, in float32; all windows by default."""
    count = min(max_windows or len(tokens), (len(tokens) - 1) // length)
    starts = np.linspace(0, len(tokens) - length - 1, count).astype(int)
    losses = [float(next_token_loss(model, torch.from_numpy(tokens[s : s + length + 1].astype(np.int64))[None])) for s in starts]
    return sum(losses) / len(losses)


def train_target(
    train: np.ndarray,
    held_out: np.ndarray,
    recipe: TargetRecipe,
    report: Callable[[dict[str, float]], None],
    checkpoint: Callable[[Gemma4ForCausalLM], None],
) -> tuple[Gemma4ForCausalLM, dict[str, object]]:
    """Trains for `recipe.minutes`; returns the model and what was measured. Seeded, but the clock decides the step count."""
    torch.manual_seed(recipe.seed)
    model = Gemma4ForCausalLM._from_config(config_for(recipe), attn_implementation="eager")
    initialise(model, recipe.seed)
    optimizers = optimizers_for(model, recipe.muon_rate, recipe.adam_rate, recipe.weight_decay)
    step_loss = torch.compile(next_token_loss, dynamic=False)
    short = windows(train, recipe.short_length, recipe.batch_tokens // recipe.short_length, recipe.seed)
    long = windows(train, recipe.sequence_length, recipe.batch_tokens // recipe.sequence_length, recipe.seed + 1)

    def loss_of(progress: float) -> torch.Tensor:
        return step_loss(model, next(short if progress < 1 - recipe.long_share else long))

    def keep(step: int) -> None:
        report({"step": step, "validation_loss": validation_loss(model, held_out, recipe.sequence_length, QUICK_WINDOWS)})
        checkpoint(model)

    rates = {"warm_up": recipe.warm_up, "cool_down": recipe.cool_down}
    steps = train_for(recipe.minutes, model, optimizers, loss_of, **rates, report=report, keep=keep)
    return model, {"steps": steps, "tokens_seen": steps * recipe.batch_tokens, "recipe": asdict(recipe)}
