"""Tunes a drafter: the target writes on from a user's text, the drafter is trained on it, and both are judged on text neither has seen.

Imports torch: import it only where a drafter is trained.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch

from edge_export.errors import ExportError, ParityError
from edge_export.output.state_folder import prepare_state
from edge_export.parity.reference import Reference, load_reference, torch_threads
from edge_export.quantization.calibration import read_text
from edge_export.tuning.texts import Tokens, parts_of, prompts_from, written_after
from edge_export.tuning.training import Accepted, Recipe, acceptance, gain, train
from edge_runtime.bundle.manifest import DrafterTuning

# Tokens of a prompt and of a whole text; texts to train on, to judge by, and written at once.
PROMPT, LENGTH = 48, 192
TEXTS, HELD_OUT, BATCH = 480, 48, 96
# Half of the training texts are greedy, the others sampled.
TEMPERATURES = (0.0, 0.7)
DRAFT_LENGTH = 3
# Acceptance is shown after each of these shares of the training.
PARTS = 4
_SEED = 20261122


@dataclass(frozen=True, kw_only=True)
class TuningRequest:
    """The pair, the text, and the folder of the state. `banned` tokens are never written: those that end a text."""

    reference: Reference
    text: Path
    folder: Path
    minutes: float
    banned: tuple[int, ...]

    @property
    def result(self) -> Path:
        """The folder of the tuned drafter."""
        return self.folder / "drafter"


def tune(request: TuningRequest, notify: Callable[[str], None]) -> DrafterTuning | None:
    """Writes the tuned drafter to `request.result` and returns its record; None if it is not better than the original.

    A call that was stopped goes on where it was. Raises ExportError if the text is unusable or too short.
    """
    text, source = read_text(request.text, "text to tune on")
    facts = (source.sha256, asdict(Recipe(minutes=request.minutes)), TEXTS, LENGTH)
    prepare_state(request.folder, facts, (request.reference.target.path, request.reference.drafter.path), "--tune-drafter")
    with torch_threads(request.reference.threads):
        try:
            target = request.reference.load_target().requires_grad_(False)
            drafter = request.reference.load_drafter()
        except ParityError as error:
            raise ExportError(f"tuning failed: {error}") from error
        texts, held = _texts(request, target, text, notify)
        before = _judge(target, drafter, held)
        notify(f"The drafter as it is: {before.rate:.1%} of {DRAFT_LENGTH} drafts accepted on text that tuning does not see.")
        recipe = Recipe(minutes=request.minutes)
        for part in range(1, PARTS + 1):
            state = train(target, drafter, texts, recipe, request.folder, until=part / PARTS)
            if part < PARTS:
                notify(f"Tuned for {state.seconds / 60:.1f} of {request.minutes:g} minutes: {_judge(target, drafter, held).rate:.1%}.")
        _save(drafter, request)
        after = _judge(target, load_reference(request.result), held)
    low, high = gain(before, after)
    verdict = f"{after.rate:.1%} after tuning, {100 * (after.rate - before.rate):+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"
    if low <= 0:
        notify(f"The original drafter stays: {verdict}.")
        return None
    notify(f"The tuned drafter replaces the original: {verdict}.")
    return DrafterTuning(
        name=source.name,
        bytes=source.bytes,
        sha256=source.sha256,
        texts=len(texts),
        steps=state.steps,
        minutes=state.seconds / 60,
        draft_length=DRAFT_LENGTH,
        acceptance_before=before.rate,
        acceptance=after.rate,
    )


def _judge(target: Any, drafter: Any, held: Tokens) -> Accepted:
    return acceptance(target, drafter, held, prompt=PROMPT, length=DRAFT_LENGTH, batch=8)


def _texts(request: TuningRequest, target: Any, text: str, notify: Callable[[str], None]) -> tuple[Tokens, Tokens]:
    """Returns the texts to train on and those to judge by. Writing takes at most as long as the training."""
    tokenizer = request.reference.tokenizer()
    length = min(LENGTH, request.reference.architecture.context)
    parts, held_parts = parts_of(text)
    begin = monotonic()
    end = target.config.get_text_config().eos_token_id
    ends = sorted({*request.banned, *(end if isinstance(end, list) else [] if end is None else [end])})

    def written(name: str, number: int, parts: list[str], count: int, prompt: int, temperature: float) -> Tokens:
        path = request.folder / f"{name}.npy"
        if path.is_file():
            tokens: Tokens = np.load(path, allow_pickle=False)
            return tokens
        prompts = prompts_from(parts, tokenizer, length=prompt, count=count, random=np.random.default_rng((_SEED, number)))
        made = written_after(target, prompts, length=length, temperature=temperature, banned=ends, seed=_SEED + number)
        np.save(path, made)
        return made

    held = written("held-out", 0, held_parts, HELD_OUT, PROMPT, 0.0)
    batches: list[Tokens] = []
    while len(batches) * BATCH < TEXTS and (not batches or monotonic() - begin < 60 * request.minutes):
        number = len(batches)
        prompt = PROMPT if number // len(TEMPERATURES) % 2 else PROMPT // 2
        batches.append(written(f"texts-{number}", 1 + number, parts, BATCH, prompt, TEMPERATURES[number % len(TEMPERATURES)]))
        notify(f"The target has written {len(batches) * BATCH} of {TEXTS} texts of {length} tokens.")
    return np.concatenate(batches), held


def _save(drafter: Any, request: TuningRequest) -> None:
    """Writes the drafter as a checkpoint, in the type of the original and with its other files."""
    original = request.reference.drafter.path
    config = json.loads((original / "config.json").read_text(encoding="utf-8"))
    kind = getattr(torch, str(config.get("dtype", config.get("torch_dtype", "bfloat16"))), torch.bfloat16)
    drafter.to(kind).save_pretrained(request.result)
    drafter.to(torch.float32)
    for path in sorted(original.iterdir()):
        if path.suffix in (".json", ".jinja", ".md") and not path.name.endswith(".index.json"):
            shutil.copy(path, request.result / path.name)
