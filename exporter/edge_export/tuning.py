"""Tunes a drafter on a user's text.

The target continues parts of a user's text, and the drafter is trained on what it writes. The original and the tuned drafter are then
compared on text that was not used for training. This module imports torch, so import it only to train a drafter.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from edge_export.errors import ExportError, ParityError
from edge_export.output import prepare_state
from edge_export.parity.reference import Reference, load_reference, torch_threads
from edge_export.quantization.calibration import read_text
from edge_runtime.bundle.manifest import DrafterTuning

Tokens = NDArray[np.int64]
# The text is cut into this number of parts. Every HELD_OUT_EVERY-th part is used only to evaluate the drafter.
TEXT_PARTS, HELD_OUT_EVERY = 20, 5


def parts_of(text: str) -> tuple[list[str], list[str]]:
    """Returns the parts of a text for training, and those for evaluation. A part ends at the end of a line."""
    lines, parts = text.splitlines(keepends=True), [""]
    for line in lines:
        if len(parts[-1]) >= len(text) / TEXT_PARTS and len(parts) < TEXT_PARTS:
            parts.append("")
        parts[-1] += line
    held = [part for index, part in enumerate(parts) if index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    return [part for index, part in enumerate(parts) if index % HELD_OUT_EVERY != HELD_OUT_EVERY - 1], held


def prompts_from(parts: Sequence[str], tokenizer: Any, *, length: int, count: int, random: np.random.Generator) -> Tokens:
    """Returns prompts [count, length] that begin at the start of a line, or inside a long line.

    Raises ExportError if the text is too short for one prompt.
    """
    begin = tokenizer.encode("", add_special_tokens=True)
    needed = length - len(begin)
    starts = [(index, at) for index, part in enumerate(parts) for at in _starts(part)]
    prompts: list[list[int]] = []
    for start in random.permutation(len(starts)):
        index, at = starts[start]
        ids = tokenizer.encode(parts[index][at : at + 16 * needed], add_special_tokens=False)
        if len(ids) >= needed:
            prompts.append([*begin, *ids[:needed]])
        if len(prompts) == count:
            break
    if not prompts:
        raise ExportError(f"the text to tune on has no part of {needed} tokens; give more text of the kind that the model will read")
    return np.array([prompts[index % len(prompts)] for index in range(count)], dtype=np.int64)


def _starts(part: str) -> Iterator[int]:
    at = 0
    for line in part.splitlines(keepends=True):
        yield from range(at, at + len(line), 400)
        at += len(line)


def written_after(target: Any, prompts: Tokens, *, length: int, temperature: float, banned: Sequence[int], seed: int) -> Tokens:
    """Continues prompts [N, P] to texts [N, length] without `banned` tokens. Temperature 0 means greedy decoding."""
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.from_numpy(prompts)
    cache, step = DynamicCache(config=target.config.get_text_config()), tokens
    with torch.inference_mode():
        while tokens.shape[1] < length:
            # A position, as a tensor. Given a number, transformers 5.24 cuts the rows before layers that share K/V, and fails on per-layer
            # inputs that a model does not have.
            kept = torch.tensor([step.shape[1] - 1])
            logits = target(input_ids=step, past_key_values=cache, logits_to_keep=kept).logits[:, -1].float()
            logits[:, list(banned)] = -torch.inf
            if temperature:
                step = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
            else:
                step = logits.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, step], dim=1)
    written: Tokens = tokens.numpy()
    return written


# In training, the drafter runs at all positions of a text at once, in the same way as it drafts: several steps at a constant position, on
# the target's rows. At position n it sees token n, the target's hidden row n-1 and the K/V rows before n, and its j-th step predicts token
# n+j. Step j is one forward over all positions, with the tokens shifted by j-1.

STATE_NAME = "training.safetensors"
# The state that AdamW keeps for each weight.
_SUMS = ("step", "exp_avg", "exp_avg_sq")
SAVE_SECONDS = 30.0
# The most logits of a training step. Several copies of them are in memory.
MAX_LOGITS = 16 << 20
_WARM_UP = 0.05
_MASKED = -1e9
# The factor for the loss of each further step of a draft. Later steps matter less, because they are used only if those before were
# accepted.
_STEP_WEIGHT = 0.9
_CENTROID_WEIGHT = 0.2
RESAMPLES = 2000
_SEED = 20261122


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to tune a drafter. The learning rate depends on the used share of `minutes`, so a slow machine just makes fewer steps."""

    minutes: float = 10.0
    draft_steps: int = 4
    batch: int = 8
    rate: float = 1e-3
    seed: int = _SEED


@dataclass(frozen=True, kw_only=True)
class State:
    """The progress of a training."""

    steps: int = 0
    seconds: float = 0.0


def train(target: Any, drafter: Any, texts: Tokens, recipe: Recipe, folder: Path, until: float = 1.0) -> State:
    """Trains `drafter` in place on texts [N, T], until the share `until` of the recipe's minutes is used.

    It continues from the state in `folder`, if there is one. Raises ExportError if the loss is not finite.
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
            _save_state(folder, drafter, optimizer, state)
            saved = now
    _save_state(folder, drafter, optimizer, state)
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
        raise ExportError(
            f"tuning the drafter failed: its loss became {value} in step {step}; the model, the drafter or the text is unusable"
        )


def _segment(length: int, vocabulary: int, recipe: Recipe, random: np.random.Generator) -> Segment:
    """Returns all positions of a text, or a random range of as many as MAX_LOGITS allows."""
    positions = length - recipe.draft_steps
    count = min(positions, max(8, MAX_LOGITS // (vocabulary * recipe.batch)))
    return Segment(first=1 + int(random.integers(positions - count + 1)), count=count, steps=recipe.draft_steps)


def _save_state(folder: Path, drafter: Any, optimizer: Any, state: State) -> None:
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


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Positions `first` to `first + count - 1` of each text, with `steps` draft steps from each."""

    first: int
    count: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class TargetRows:
    """The drafter's inputs for tokens [B, T]: embedded and hidden rows [B, T, H], K/V by layer type [B, heads, T, d].

    `logits` [B, count + steps - 1, V], from which it learns, begin at the segment's first position.
    """

    embedded: Any
    hidden: Any
    shared: dict[str, tuple[Any, Any]]
    logits: Any


def target_rows(target: Any, tokens: Any, segment: Segment) -> TargetRows:
    """Runs the target once on tokens [B, T]."""
    kept = torch.arange(segment.first, segment.first + segment.count + segment.steps - 1)
    with torch.no_grad():
        output = target(input_ids=tokens, use_cache=False, output_hidden_states=True, return_shared_kv_states=True, logits_to_keep=kept)
        embedded = target.get_input_embeddings()(tokens)
    return TargetRows(
        embedded=embedded,
        hidden=output.hidden_states[-1],
        shared=dict(output.shared_kv_states),
        logits=output.logits.float(),
    )


def _masks(segment: Segment, length: int, window: int) -> dict[str, Any]:
    """Returns additive masks [1, 1, count, T]. Position n sees only rows before n, on sliding layers at most window - 1 of them."""
    back = torch.arange(segment.first, segment.first + segment.count)[:, None] - torch.arange(length)[None, :]
    full = torch.where(back > 0, 0.0, _MASKED)
    sliding = torch.where((back > 0) & (back < window), 0.0, _MASKED)
    return {"full_attention": full[None, None], "sliding_attention": sliding[None, None]}


def draft_states(drafter: Any, rows: TargetRows, segment: Segment) -> Iterator[Any]:
    """Yields the drafter's normed state [B, count, hidden] of each step. Entry i of step j (from 1) predicts token first + i + j."""
    first, last = segment.first, segment.first + segment.count
    masks = _masks(segment, rows.hidden.shape[1], drafter.config.get_text_config().sliding_window)
    hidden = rows.hidden[:, first - 1 : last - 1]
    # All positions, as a tensor. Given a number, transformers 5.24 cuts the rows before layers that share K/V, and fails on per-layer
    # inputs that a model does not have.
    kept = torch.arange(segment.count)
    for step in range(segment.steps):
        embedded = rows.embedded[:, first + step : last + step]
        state = drafter.model(
            inputs_embeds=drafter.pre_projection(torch.cat([embedded, hidden], dim=-1)),
            attention_mask=masks,
            position_ids=torch.arange(first, last)[None],
            shared_kv_states=dict(rows.shared),
            use_cache=False,
            logits_to_keep=kept,
        ).last_hidden_state
        hidden = drafter.post_projection(state)
        yield state


def distillation_loss(drafter: Any, rows: TargetRows, segment: Segment) -> Any:
    """Returns the loss, a weighted sum over steps: half KL to the target's distribution, half cross-entropy with its choice.

    With a sparse head, the cross-entropy of the centroids is added.
    """
    teacher, choice = torch.log_softmax(rows.logits, dim=-1), rows.logits.argmax(-1)
    embedder = getattr(drafter, "masked_embedding", None)
    total = torch.zeros(())
    for step, state in enumerate(draft_states(drafter, rows, segment)):
        expected, label = teacher[:, step : step + segment.count], choice[:, step : step + segment.count].flatten()
        student = torch.log_softmax(drafter.lm_head(state).float(), dim=-1)
        divergence = nn.functional.kl_div(student, expected, log_target=True, reduction="none").sum(-1).mean()
        loss = 0.5 * divergence + 0.5 * nn.functional.nll_loss(student.flatten(0, 1), label)
        if embedder is not None:
            clusters = embedder.centroids(state).float().flatten(0, 1)
            loss = loss + _CENTROID_WEIGHT * nn.functional.cross_entropy(clusters, _cluster_of(embedder)[label])
        total = total + loss * _STEP_WEIGHT**step
    return total


def _cluster_of(embedder: Any) -> Any:
    """Returns the centroid of each token [V]."""
    order = embedder.token_ordering.long()
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)) // embedder.vocab_size_per_centroid)


def greedy_choice(drafter: Any, state: Any) -> Any:
    """Returns the drafted tokens [B, P] for states [B, P, hidden]. With a sparse head, only tokens of the best centroids are considered."""
    logits = drafter.lm_head(state).float()
    embedder = getattr(drafter, "masked_embedding", None)
    if embedder is not None:
        best = embedder.centroids(state).topk(embedder.centroid_intermediate_top_k, dim=-1).indices
        allowed = torch.zeros(*state.shape[:2], embedder.num_centroids, dtype=torch.bool).scatter_(-1, best, True)
        logits = logits.masked_fill(~allowed[..., _cluster_of(embedder)], -math.inf)
    return logits.argmax(-1)


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """Numbers of drafted and accepted tokens in each text, int64 [texts]."""

    drafted: NDArray[np.int64]
    accepted: NDArray[np.int64]

    @classmethod
    def of(cls, confirmed: Tokens, *, length: int) -> Accepted:
        """Counts rounds of `length` drafts. `confirmed` [texts, positions] is how many drafts from each position the text confirms."""
        drafted, accepted = [], []
        for text in confirmed:
            at = rounds = right = 0
            while at < len(text):
                rounds, right, at = rounds + 1, right + int(text[at]), at + int(text[at]) + 1
            drafted.append(rounds * length)
            accepted.append(right)
        return cls(drafted=np.array(drafted), accepted=np.array(accepted))

    @property
    def rate(self) -> float:
        """Accepted / drafted."""
        return float(self.accepted.sum() / self.drafted.sum())


def acceptance(target: Any, drafter: Any, texts: Tokens, *, prompt: int, length: int, batch: int) -> Accepted:
    """Counts rounds of `length` drafts in texts [N, T], after their first `prompt` tokens.

    A round accepts the longest prefix of its drafts that the text confirms. The next round begins that number plus one later.
    """
    segment = Segment(first=prompt - 1, count=texts.shape[1] - length - prompt + 1, steps=length)
    starts = range(0, len(texts), batch)
    confirmed = [_confirmed(target, drafter, torch.from_numpy(texts[start : start + batch]), segment) for start in starts]
    return Accepted.of(np.concatenate(confirmed), length=length)


def _confirmed(target: Any, drafter: Any, tokens: Any, segment: Segment) -> Tokens:
    """Returns [N, count]: how many drafts from each position of the segment the text confirms."""
    first, last = segment.first, segment.first + segment.count
    with torch.inference_mode():
        rows = target_rows(target, tokens, segment)
        states = enumerate(draft_states(drafter, rows, segment), start=1)
        right = [greedy_choice(drafter, state) == tokens[:, first + step : last + step] for step, state in states]
        lengths: Tokens = torch.stack(right).long().cumprod(0).sum(0).numpy()
    return lengths


def gain(before: Accepted, after: Accepted) -> tuple[float, float]:
    """Returns the 95% interval for the difference of two acceptance rates on the same texts, by bootstrap over the texts."""
    chosen = np.random.default_rng(1).integers(len(before.drafted), size=(RESAMPLES, len(before.drafted)))
    rates = [counts.accepted[chosen].sum(1) / counts.drafted[chosen].sum(1) for counts in (after, before)]
    low, high = np.quantile(rates[0] - rates[1], (0.025, 0.975))
    return float(low), float(high)


# Tokens of a prompt and of a whole text. Texts for training, for evaluation, and written at once.
PROMPT, LENGTH = 48, 192
TEXTS, HELD_OUT, BATCH = 480, 48, 96
# Half of the training texts are written greedily, the others are sampled.
TEMPERATURES = (0.0, 0.7)
DRAFT_LENGTH = 3
# The acceptance is shown after each of this number of equal parts of the training.
PARTS = 4


@dataclass(frozen=True, kw_only=True)
class TuningRequest:
    """The pair, the text, and the folder of the state. `banned` tokens end a text, so they are never written."""

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

    If an earlier call was stopped, it continues from there. Raises ExportError if the text is unusable or too short.
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
    """Returns the texts for training and for evaluation. Writing takes about as long as the training at most."""
    tokenizer = request.reference.tokenizer()
    length = min(LENGTH, request.reference.architecture.context)
    parts, held_parts = parts_of(text)
    begin = time.monotonic()
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
    while len(batches) * BATCH < TEXTS and (not batches or time.monotonic() - begin < 60 * request.minutes):
        number = len(batches)
        prompt = PROMPT if number // len(TEMPERATURES) % 2 else PROMPT // 2
        batches.append(written(f"texts-{number}", 1 + number, parts, BATCH, prompt, TEMPERATURES[number % len(TEMPERATURES)]))
        notify(f"The model has written {len(batches) * BATCH} of {TEXTS} texts of {length} tokens.")
    return np.concatenate(batches), held


def _save(drafter: Any, request: TuningRequest) -> None:
    """Writes the drafter as a checkpoint, with the original's dtype and other files."""
    original = request.reference.drafter.path
    config = json.loads((original / "config.json").read_text(encoding="utf-8"))
    kind = getattr(torch, str(config.get("dtype", config.get("torch_dtype", "bfloat16"))), torch.bfloat16)
    drafter.to(kind).save_pretrained(request.result)
    drafter.to(torch.float32)
    for path in sorted(original.iterdir()):
        if path.suffix in (".json", ".jinja", ".md") and not path.name.endswith(".index.json"):
            shutil.copy(path, request.result / path.name)
