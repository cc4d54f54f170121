"""What the scripts that make pairs share: checkpoints as Gemma 4's are stored, and what was measured beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM


def load_target(folder: Path) -> Gemma4ForCausalLM:
    """Returns the target as it is shipped: bf16 weights, computed in float32."""
    return Gemma4ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def load_drafter(folder: Path) -> Gemma4AssistantForCausalLM:
    """Returns the drafter, as `load_target`."""
    return Gemma4AssistantForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def load_tokenizer(folder: Path) -> Tokenizer:
    """Returns the tokenizer of a checkpoint folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def save_model(model: nn.Module, folder: Path) -> None:
    """Writes bf16 safetensors as a Gemma 4 checkpoint has them; the float32 weights in memory stay as they are."""
    # The head is tied to the embedding: one copy is stored, as in the published checkpoints.
    kept = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    state = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in kept.items()}
    model.save_pretrained(folder, state_dict=state)
    config = folder / "config.json"  # save_pretrained names the dtype of the weights in memory, not of the file
    config.write_text(config.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))


def write_measured(folder: Path, name: str, measured: Mapping[str, object]) -> None:
    """Keeps the figures of a stage beside the models."""
    (folder / f"{name}.measured.json").write_text(json.dumps(measured, indent=2, ensure_ascii=False) + "\n")


def log(record: Mapping[str, object]) -> None:
    """Prints one JSON line to standard error."""
    click.echo(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in record.items()}), err=True)
