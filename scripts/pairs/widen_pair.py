"""Widens a pair to any cost without changing what it computes, so that a benchmark has a phone-sized model's cost and a real
drafter's acceptance.

    python scripts/pairs/widen_pair.py exporter/edge_export/reference_pair -o /tmp/wide --intermediate 49152 --vocabulary 65536

Feed-forward layers get rows and columns of zeros. The vocabulary gets unused tokens whose logits are far below all others: their
rows point away from every hidden row (a direction g with h.g near 1 for all h is fitted, the rows are -SCALE g). Needs the `train` extra.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from edge_export.checkpoint import sources
from refpair import tokenizer
from refpair.checkpoint import load_drafter, load_target, load_tokenizer
from refpair.drafter import draft_states, target_rows

# Softcapping bounds target logits to 30; rows this long put the unused ones near -30 even where the fit is poor.
SCALE = 60.0
# Texts whose hidden rows the unused tokens point away from, and tokens of each.
SAMPLES, SAMPLE_TOKENS = 24, 256
TIGHTEST_FIT = 0.2
FITS = 12


def sample_tokens(folder: Path) -> torch.Tensor:
    """Token ids [2 SAMPLES, SAMPLE_TOKENS]: this Python's own sources and random tokens, to see hidden rows of text and of nonsense."""
    pieces = load_tokenizer(folder)
    source = "".join(Path(module.__file__).read_text(encoding="utf-8") for module in (json, shutil, np, click) if module.__file__)
    ids = pieces.encode(source, add_special_tokens=False).ids
    step = (len(ids) - SAMPLE_TOKENS) // SAMPLES
    text = [[2, *ids[i * step : i * step + SAMPLE_TOKENS - 1]] for i in range(SAMPLES)]
    noise = torch.randint(pieces.get_vocab_size(), (SAMPLES, SAMPLE_TOKENS), generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.tensor(text), noise])


def away_from(rows: torch.Tensor) -> torch.Tensor:
    """Returns g with rows @ g near 1 for all rows [N, H]; refuses when some row is nearly orthogonal.

    Least squares, weighted anew a few times so that the rows that fit worst from below count most.
    """
    rows = rows.double()
    weights = torch.ones(len(rows), 1, dtype=torch.float64)
    for _ in range(FITS):
        direction = torch.linalg.lstsq(rows * weights, weights).solution[:, 0]
        weights = weights * (1 + (1 - rows @ direction).clamp(min=0.0, max=2.0))[:, None]
    tightest = float((rows @ direction).min())
    if tightest < TIGHTEST_FIT:
        raise click.ClickException(f"unused tokens would come near some hidden row (tightest fit {tightest:.3f}); leave the vocabulary")
    return direction.float()


def directions(pair: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns g for the target's hidden rows and for the drafter's."""
    target, drafter = load_target(pair / "target"), load_drafter(pair / "drafter")
    tokens = sample_tokens(pair / "target")
    with torch.no_grad():
        rows = target_rows(target, tokens)
        states = [state[:, 1:-4].flatten(0, 1) for state in draft_states(drafter, target, tokens, rows, 4)]
    return away_from(rows.hidden.flatten(0, 1)), away_from(torch.cat(states))


def pad_rows(tensor: torch.Tensor, rows: int, fill: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Returns [rows, ...] with new rows set to `fill`."""
    extra = torch.zeros(rows - tensor.shape[0], *tensor.shape[1:], dtype=tensor.dtype)
    extra[:] = fill.to(tensor.dtype) if isinstance(fill, torch.Tensor) else fill
    return torch.cat([tensor, extra])


def read_folder(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns the tensors and the configuration of a checkpoint folder."""
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def widen_target(folder: Path, output: Path, factor: int, vocabulary: int, direction: torch.Tensor) -> None:
    """Writes the target with feed-forward layers widened by the exporter, and with the wider vocabulary."""
    with tempfile.TemporaryDirectory() as place:
        sources.widen_target(folder, Path(place) / "target", factor)
        state, config = read_folder(Path(place) / "target")
    state["model.embed_tokens.weight"] = pad_rows(state["model.embed_tokens.weight"], vocabulary, -SCALE * direction)
    state["model.embed_tokens_per_layer.weight"] = pad_rows(state["model.embed_tokens_per_layer.weight"], vocabulary)
    config |= {"vocab_size": vocabulary, "vocab_size_per_layer_input": vocabulary}
    write_folder(folder, output, state, config, vocabulary)


def widen_drafter(folder: Path, output: Path, vocabulary: int, direction: torch.Tensor) -> None:
    """Writes the drafter with the wider vocabulary; each new cluster of unused tokens has a centroid of its own."""
    state, config = read_folder(folder)
    old = config["text_config"]["vocab_size"]
    centroids = config["num_centroids"] * vocabulary // old
    state["model.embed_tokens.weight"] = pad_rows(state["model.embed_tokens.weight"], vocabulary, -SCALE * direction)
    state["masked_embedding.centroids.weight"] = pad_rows(state["masked_embedding.centroids.weight"], centroids, -SCALE * direction)
    state["masked_embedding.token_ordering"] = torch.cat([state["masked_embedding.token_ordering"], torch.arange(old, vocabulary)])
    config["text_config"]["vocab_size"] = vocabulary
    config["num_centroids"] = centroids
    write_folder(folder, output, state, config, vocabulary)


def write_folder(source: Path, output: Path, state: dict[str, torch.Tensor], config: dict[str, Any], vocabulary: int) -> None:
    """Writes one checkpoint folder with its grown tokenizer."""
    state.pop("lm_head.weight", None)  # a copy of the tied embedding, which has grown
    output.mkdir(parents=True)
    save_file({k: v.contiguous() for k, v in state.items()}, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.copy(source, output, size=vocabulary)


@click.command(context_settings={"show_default": True})
@click.argument("pair", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--output", "-o", type=click.Path(path_type=Path), required=True, help="New folder for target/ and drafter/.")
@click.option("--intermediate", default=49152, help="The target's new intermediate size, a multiple of the old one.")
@click.option("--vocabulary", default=65536, help="The new vocabulary size, a multiple of the old one.")
def main(pair: Path, output: Path, intermediate: int, vocabulary: int) -> None:
    """Widen PAIR (a folder with target/ and drafter/)."""
    config = json.loads((pair / "target" / "config.json").read_text())
    factor, rest = divmod(intermediate, config["intermediate_size"])
    if rest or factor < 1 or vocabulary % config["vocab_size"] or vocabulary < config["vocab_size"]:
        old = f"{config['intermediate_size']} and {config['vocab_size']}"
        raise click.ClickException(f"--intermediate {intermediate} and --vocabulary {vocabulary} must be multiples of {old}")
    if output.exists():
        raise click.ClickException(f"{output} exists; choose a new folder")
    target_direction, drafter_direction = directions(pair)
    widen_target(pair / "target", output / "target", factor, vocabulary, target_direction)
    widen_drafter(pair / "drafter", output / "drafter", vocabulary, drafter_direction)
    click.echo(f"{output}: intermediate {intermediate}, vocabulary {vocabulary}")


if __name__ == "__main__":
    sys.exit(main())
