"""Whether second candidates pay: replays rounds with and without them on recorded drafts and cost curves, without a clock.

    python scripts/benchmarks/replay_trees.py record -o trees.npz
    python scripts/benchmarks/replay_trees.py replay trees.npz

`record` lets the reference pair's target write greedily after the shipped prompts, and keeps at every position the two likeliest drafts of
8 steps with their probabilities. `replay` adds a token to a round as long as its chance is worth its row: the next draft of the chain, or a
second candidate at a place of it, whose acceptance saves the next token. The chances are those of the recorded drafts themselves, by bins
of probability, which favours trees: what does not pay here pays nowhere. Moving the K/V rows of a branch costs nothing here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from bench_sources import CURVES, OVERHEAD, STEP, interval

STEPS, PROMPT, LENGTH = 8, 48, 176
BINS = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95, 0.99])
# Milliseconds of 1 to 13 rows; "kernels": 503 M weights on Zen 4, 1, 2, 4, 6, 8 and 12 rows measured, the others interpolated.
KERNELS = tuple(np.interp(range(1, 14), (1, 2, 4, 6, 8, 12, 13), 15.9 * np.array([1, 1.05, 1.47, 1.48, 1.5, 2.07, 2.2])).round(2))
COSTS = {**CURVES, "kernels": KERNELS, "free to 13": (8.0,) * 13}


@click.group(context_settings={"show_default": True})
def main() -> None:
    """Record drafts with second candidates, and replay rounds on them."""


@main.command()
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--texts", default=12, help="Prompts of code and of prose.")
def record(output: Path, texts: int) -> None:
    """Write the drafts of the reference pair."""
    import torch
    from transformers import PreTrainedTokenizerFast

    from edge_export.checkpoint.shipped_pair import reference_pair
    from edge_export.parity.reference import load_reference
    from edge_export.tuning.texts import written_after
    from edge_export.tuning.training import Segment, draft_states, target_rows

    folders = reference_pair()
    target, drafter = (load_reference(folder) for folder in folders)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folders[0] / "tokenizer.json"))
    prompts = []
    for kind in ("code", "prose"):
        result = json.loads((folders[0].parent / f"prompts.{kind}.json").read_text(encoding="utf-8"))
        prompts += [tokenizer.encode(text)[:PROMPT] for text in result[:texts]]
    written = written_after(
        target, np.array([each for each in prompts if len(each) == PROMPT]), length=LENGTH, temperature=0.0, banned=[1], seed=1
    )
    segment = Segment(first=PROMPT - 1, count=LENGTH - PROMPT - STEPS + 1, steps=STEPS)
    right, sure = [], []
    with torch.inference_mode():
        for begin in range(0, len(written), 8):
            tokens = torch.from_numpy(written[begin : begin + 8])
            for_steps: list[tuple[Any, Any]] = []
            for step, state in enumerate(draft_states(drafter, target_rows(target, tokens, segment), segment), start=1):
                best = torch.softmax(drafter.lm_head(state).float(), -1).topk(2)
                expected = tokens[:, segment.first + step : segment.first + step + segment.count]
                for_steps.append((best.indices == expected[..., None], best.values))
            right.append(torch.stack([each for each, _ in for_steps], 2).numpy())
            sure.append(torch.stack([each for _, each in for_steps], 2).numpy())
    np.savez(output, right=np.concatenate(right), sure=np.concatenate(sure))


def chances_of(right: NDArray[np.bool_], sure: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the chance of each first candidate, and of each second one given that the first is wrong; [texts, places, steps].

    Drafts behind a wrong one count too: the recorded ones follow the text.
    """
    first, second = np.digitize(sure[..., 0], BINS), np.digitize(sure[..., 1], BINS)
    wrong = ~right[..., 0]

    def share(bins: NDArray[np.int64], hit: NDArray[np.bool_], of_it: NDArray[np.bool_]) -> NDArray[np.float64]:
        count = np.bincount(bins[of_it], minlength=len(BINS) + 1)
        result = np.bincount(bins[of_it & hit], minlength=len(BINS) + 1) / np.maximum(count, 1)
        return result[bins]

    return share(first, right[..., 0], np.ones_like(wrong)), share(second, right[..., 1], wrong)


def rate(
    right: NDArray[np.bool_], chances: tuple[NDArray[np.float64], NDArray[np.float64]], verify: tuple[float, ...], candidates: int
) -> NDArray[np.float64]:
    """Returns the tokens a millisecond of each text, with at most so many second candidates a round, at the rate that pays best."""
    best = np.zeros(len(right))
    worth = 1 / verify[0]
    for _ in range(4):
        tokens, spent = np.zeros(len(right)), np.zeros(len(right))
        for text in range(len(right)):
            at = 0
            while at < right.shape[1]:
                drafts, seconds = plan(chances[0][text, at], chances[1][text, at], verify, worth, candidates)
                accepted = int(np.argmin([*right[text, at, :drafts, 0], False]))
                saved = accepted in seconds and bool(right[text, at, accepted, 1])
                spent[text] += verify[drafts + len(seconds)] + (1e3 * (OVERHEAD + STEP * drafts) if drafts else 0.0)
                tokens[text] += accepted + 1 + saved
                at += accepted + 1 + saved
        best, worth = tokens / spent, float(tokens.sum() / spent.sum())
    return best


def plan(
    first: NDArray[np.float64], second: NDArray[np.float64], verify: tuple[float, ...], worth: float, limit: int
) -> tuple[int, set[int]]:
    """Returns the number of drafts and the places of second candidates with the most expected tokens less `worth` times the cost."""
    best, result = 1 - worth * verify[0], (0, set[int]())
    reached = np.concatenate([[1.0], np.cumprod(first)])
    for drafts in range(1, len(first) + 1):
        gains = reached[:drafts] * (1 - first[:drafts]) * second[:drafts]
        order = np.argsort(-gains)
        for count in range(min(limit, drafts, len(verify) - 1 - drafts) + 1):
            chosen = order[:count]
            value = reached[: drafts + 1].sum() + gains[chosen].sum()
            value -= worth * (verify[drafts + count] + 1e3 * (OVERHEAD + STEP * drafts))
            if value > best:
                best, result = value, (drafts, set(chosen.tolist()))
    return result


@main.command()
@click.argument("recorded", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def replay(recorded: Path) -> None:
    """Print the speed with second candidates over that without, by cost curve."""
    data = np.load(recorded)
    right, sure = data["right"], data["sure"]
    chances = chances_of(right, sure)
    wrong = ~right[..., 0]
    click.echo(f"{len(right)} texts; where the first candidate is wrong, the second is right: {right[..., 1][wrong].mean():.1%}")
    for name, verify in COSTS.items():
        alone = rate(right, chances, verify, 0)
        ratios = " ".join(f"{limit}: {interval(list(rate(right, chances, verify, limit) / alone))}" for limit in (1, 2, 4))
        click.echo(f"{name}: chain {alone.mean() * verify[0]:.2f} times plain; at most so many second candidates {ratios}")


if __name__ == "__main__":
    main()
