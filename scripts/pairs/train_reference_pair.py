"""Trains the reference pair that edge-mtp ships, a Gemma 4 target and its MTP drafter, on the text of the standard library.

    python scripts/pairs/train_reference_pair.py --output /tmp/pair --minutes 90 --drafter-minutes 40

Needs the `train` extra (pip install -e '.[train]'). Runs on a CPU within the given time; no GPU is needed.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path

import click
import numpy as np
import torch
from transformers import Gemma4ForCausalLM

from edge_export.tuning import written_after
from refpair import corpus, evaluate
from refpair import tokenizer as gemma_tokenizer
from refpair.checkpoint import load_drafter, load_target, load_tokenizer, log, save_model, write_measured
from refpair.drafter import DrafterRecipe, train_drafter
from refpair.target import TargetRecipe, train_target, validation_loss

# With names in braces for what was measured.
CARD = Path(__file__).parent / "refpair" / "card.md"
STAGES = ("target", "write", "drafter", "evaluate")
TEXT_LENGTH = 256
PROMPT_LENGTH = 48
WRITERS = 96
# Acceptance is measured on greedy text; the share of the corpus keeps the drafter from overfitting to the target's loops.
CORPUS_SHARE = 0.2
PROSE_SHARE = 0.35
EVALUATION_PROMPTS = 24


def target_stage(output: Path, minutes: float, seed: int) -> None:
    """Trains the tokenizer and the target, and measures the target as it is shipped."""
    train, held = corpus.load_splits()
    tokenizer = gemma_tokenizer.build([d.text for d in train.code + train.prose], TargetRecipe.vocab_size)
    folder = output / "target"
    gemma_tokenizer.save(tokenizer, folder)
    train_tokens = train.tokens(tokenizer, prose_repeats=corpus.PROSE_REPEATS, seed=seed)
    held_tokens = held.tokens(tokenizer, seed=seed)
    log({"train_tokens": len(train_tokens), "held_out_tokens": len(held_tokens)})
    recipe = TargetRecipe(minutes=minutes, seed=seed)
    model, measured = train_target(train_tokens, held_tokens, recipe, log, lambda m: save_model(m, output / "unfinished"))
    save_model(model, folder)
    shipped = load_target(folder)
    for name, stream in {
        "validation_loss": held_tokens,
        "validation_loss_code": corpus.Split(code=held.code, prose=[]).tokens(tokenizer),
        "validation_loss_prose": corpus.Split(code=[], prose=held.prose).tokens(tokenizer),
    }.items():
        measured[name] = validation_loss(shipped, stream, recipe.sequence_length)
    measured |= {
        "parameters": sum(p.numel() for p in shipped.parameters()),
        "train_tokens": len(train_tokens),
        "held_out_tokens": len(held_tokens),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    log(measured)
    write_measured(output, "target", measured)


def greedy_texts(target: Gemma4ForCausalLM, prompts: np.ndarray) -> np.ndarray:
    """Continues prompts [N, P] to texts of TEXT_LENGTH tokens."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return written_after(target, prompts.astype(np.int64), length=TEXT_LENGTH, temperature=0.0, banned=(), seed=0).astype(np.uint16)


def write_stage(output: Path, minutes: float, seed: int) -> None:
    """Generates the drafter's training text with the target: greedy continuations of training prompts, for `minutes`."""
    target, tokenizer = load_target(output / "target"), load_tokenizer(output / "target")
    train, _ = corpus.load_splits()
    texts, started, batch = [], time.monotonic(), 0
    while time.monotonic() - started < 60 * minutes:
        documents = train.prose if batch % 20 < 20 * PROSE_SHARE else train.code
        length = PROMPT_LENGTH if batch % 2 else PROMPT_LENGTH // 2
        prompts = evaluate.prompts_from(documents, tokenizer, length, WRITERS, seed + batch)
        texts.append(greedy_texts(target, prompts))
        batch += 1
        log({"batch": batch, "minutes": (time.monotonic() - started) / 60, "tokens": batch * WRITERS * TEXT_LENGTH})
    stream = train.tokens(tokenizer, prose_repeats=corpus.PROSE_REPEATS, seed=seed)
    written = np.concatenate(texts)
    starts = np.random.default_rng(seed).integers(len(stream) - TEXT_LENGTH, size=int(len(written) * CORPUS_SHARE / (1 - CORPUS_SHARE)))
    np.save(output / "texts.npy", np.concatenate([written, np.stack([stream[s : s + TEXT_LENGTH] for s in starts])]))


def drafter_stage(output: Path, minutes: float, write_minutes: float, seed: int) -> None:
    """Distils the drafter from the shipped target on the texts of the write stage."""
    target = load_target(output / "target")
    texts = np.load(output / "texts.npy")
    recipe = DrafterRecipe(minutes=minutes, seed=seed)
    drafter, measured = train_drafter(target, texts, recipe, log, lambda d: save_model(d, output / "unfinished-drafter"))
    save_model(drafter, output / "drafter")
    gemma_tokenizer.copy(output / "target", output / "drafter")
    measured |= {"texts": len(texts), "write_minutes": write_minutes, "parameters": sum(p.numel() for p in drafter.parameters())}
    log(measured)
    write_measured(output, "drafter", measured)


def evaluate_stage(output: Path, seed: int) -> None:
    """Measures acceptance of the reference assistant at draft lengths 1 to 6 on greedy text after held-out prompts."""
    target, tokenizer = load_target(output / "target"), load_tokenizer(output / "target")
    drafter = load_drafter(output / "drafter")
    _, held = corpus.load_splits()
    measured: dict[str, object] = {}
    for kind, documents in {"code": held.code, "prose": held.prose}.items():
        prompts = evaluate.prompts_from(documents, tokenizer, PROMPT_LENGTH, EVALUATION_PROMPTS, seed)
        texts = greedy_texts(target, prompts)
        measured[kind] = {
            f"draft_length_{k}": evaluate.measure_acceptance(target, drafter, texts, PROMPT_LENGTH, k).to_json() for k in (1, 2, 3, 4, 6)
        }
        (output / f"prompts.{kind}.json").write_text(
            json.dumps([tokenizer.decode(p[1:].tolist()) for p in prompts], indent=1, ensure_ascii=False) + "\n"
        )
    log(measured)
    write_measured(output, "acceptance", measured)
    write_card(output)


def write_card(folder: Path) -> None:
    """Writes README.md into `folder` from its *.measured.json files."""
    measured = {name: json.loads((folder / f"{name}.measured.json").read_text()) for name in ("target", "drafter", "acceptance")}
    rows = []
    for length in (1, 2, 3, 4, 6):
        row = [str(length)]
        for kind in ("code", "prose"):
            figures = measured["acceptance"][kind][f"draft_length_{length}"]
            row += [f"{figures['acceptance_rate']:.1%}", " ".join(f"{share:.0%}" for share in figures["by_position"])]
        rows.append(f"| {' | '.join(row)} |")
    setting = {"new": TEXT_LENGTH - PROMPT_LENGTH, "prompts": EVALUATION_PROMPTS, "prompt_length": PROMPT_LENGTH}
    (folder / "README.md").write_text(CARD.read_text().format(**measured, **setting, rows="\n".join(rows)))


@click.command(context_settings={"show_default": True})
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder for target/, drafter/ and what was measured.")
@click.option("--minutes", default=90.0, help="Wall time for the target.")
@click.option("--drafter-minutes", default=40.0, help="Wall time for the drafter's distillation.")
@click.option("--write-minutes", default=8.0, help="Wall time for the text the target writes for the drafter.")
@click.option("--stage", "stages", multiple=True, type=click.Choice(STAGES), default=STAGES, help="Run only these, in order.")
@click.option("--threads", default=0, help="Threads for torch; 0 leaves torch's choice.")
@click.option("--seed", default=20261121)
def main(
    output: Path, minutes: float, drafter_minutes: float, write_minutes: float, stages: tuple[str, ...], threads: int, seed: int
) -> None:
    """Train the reference pair from the standard library of the running Python."""
    if threads:
        torch.set_num_threads(threads)
    output.mkdir(parents=True, exist_ok=True)
    if "target" in stages:
        target_stage(output, minutes, seed)
    if "write" in stages:
        write_stage(output, write_minutes, seed)
    if "drafter" in stages:
        drafter_stage(output, drafter_minutes, write_minutes, seed)
    if "evaluate" in stages:
        evaluate_stage(output, seed)


if __name__ == "__main__":
    sys.exit(main())
