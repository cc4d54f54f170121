"""Trains the picture pair: a tiny Gemma 4 target with a vision tower, and its drafter, that name the colours of drawn digits.

    python scripts/pairs/train_picture_pair.py --output pictures --minutes 6 --drafter-minutes 3

The structure is E2B's; the pictures are drawn by refpair/pictures.py. Runs on a CPU within the given time; digits need longer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    Gemma4AssistantForCausalLM,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4VisionConfig,
)

from edge_export.checkpoint.shipped_pair import reference_pair
from refpair import drafter as drafting
from refpair.grow import write_grown_tokenizer
from refpair.pictures import COLOURS, DIGITS, MEDIA_TOKENS, Batch, Scene, batches, draw, example, labels, random_scene
from refpair.target import initialise, rate_at, set_rates, take_step

VOCABULARY = 4160
WORDS = 4096
SEED = 20261122
LAYERS = ["sliding_attention", "full_attention"] * 2
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' }}"
    "{% if m['content'] is string %}{{ m['content'] | trim }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] | trim }}{% elif part['type'] == 'image' %}<|image|>{% endif %}"
    "{% endfor %}{% endif %}{{ '<turn|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"
)


def target_config() -> Gemma4Config:
    """E2B's structure at toy width, without an audio tower."""
    text = Gemma4TextConfig(
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=len(LAYERS),
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=64,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        layer_types=LAYERS,
        sliding_window=64,
        final_logit_softcapping=30.0,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    vision = Gemma4VisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        global_head_dim=32,
        patch_size=16,
        pooling_kernel_size=3,
        position_embedding_size=256,
        use_clipped_linears=False,
    )
    ids = {key: WORDS + number for number, key in enumerate(MEDIA_TOKENS.values())}
    return Gemma4Config(text_config=text, vision_config=vision, audio_config=None, **ids)


def write_tokenizer(folder: Path) -> Tokenizer:
    """Writes the reference pair's tokenizer with the media tokens; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_grown_tokenizer(reference_pair()[0], folder, VOCABULARY)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    pieces = {piece: index for piece, index in tokenizer["model"]["vocab"].items() if not WORDS <= index < WORDS + len(MEDIA_TOKENS)}
    ids = {token: WORDS + number for number, token in enumerate(MEDIA_TOKENS)}
    tokenizer["model"]["vocab"] = pieces | ids
    tokenizer["added_tokens"] += [tokenizer["added_tokens"][0] | {"id": index, "content": token} for token, index in ids.items()]
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["extra_special_tokens"] = [*settings.get("extra_special_tokens", []), *ids]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer.from_file(str(path))


def lengths(tokenizer: Tokenizer) -> dict[bool, int]:
    """Returns the longest example, by whether it has a picture."""
    longest = Scene("seven", "yellow", "yellow")
    return {pictured: max(len(example(tokenizer, longest, question, draw(longest) if pictured else None).ids)
                          for question in longest.answers()) + 4 for pictured in (False, True)}  # fmt: skip


def inputs(batch: Batch, image_token: int) -> dict[str, torch.Tensor]:
    """A batch as the model's arguments."""
    ids = torch.from_numpy(batch.ids)
    arguments = {"input_ids": ids}
    if batch.patches is not None and batch.positions is not None:
        arguments |= {"pixel_values": torch.from_numpy(batch.patches), "image_position_ids": torch.from_numpy(batch.positions)}
        arguments["mm_token_type_ids"] = (ids == image_token).long()
    return arguments


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Adam for all weights: Muon's bfloat16 products take seconds a step on many CPUs."""
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=0.003, betas=(0.9, 0.98))
    optimizer.param_groups[0]["peak"] = optimizer.param_groups[0]["lr"]
    return [optimizer]


def shares(minutes: float) -> Iterator[float]:
    """Yields how much of the time has passed until all has."""
    started = time.monotonic()
    while (progress := (time.monotonic() - started) / (60 * minutes)) < 1.0:
        yield progress


def train_target(model: Any, stream: Iterator[Batch], minutes: float) -> int:
    """Trains the answers; returns the number of steps."""
    step, cap = 0, model.config.text_config.final_logit_softcapping
    # The tower learns what it shows from its own rows, long before the text model can read them; the reader is thrown away.
    reader = nn.Linear(model.config.text_config.hidden_size, len(DIGITS) + 2 * len(COLOURS))
    optimizers = optimizers_of(nn.ModuleList([model, reader]))
    for progress in shares(minutes):
        set_rates(optimizers, rate_at(progress, 0.02, 0.5))
        batch = next(stream)
        arguments = inputs(batch, model.config.image_token_id)
        digit_loss = torch.zeros(())
        if "pixel_values" in arguments:
            rows = model.model.get_image_features(arguments["pixel_values"], arguments["image_position_ids"]).pooler_output
            rows = torch.stack(list(rows)) if not isinstance(rows, torch.Tensor) else rows.view(len(batch.ids), -1, rows.shape[-1])
            parts = reader(rows.mean(1)).split([len(DIGITS), len(COLOURS), len(COLOURS)], dim=-1)
            label = torch.from_numpy(batch.labels)
            digit_loss = sum(nn.functional.cross_entropy(part, label[:, number]) for number, part in enumerate(parts))
        hidden = model.model(**arguments, use_cache=False).last_hidden_state
        is_answer = torch.from_numpy(batch.answers[:, 1:])
        logits = cap * torch.tanh(model.lm_head(hidden[:, :-1][is_answer]) / cap)
        loss = nn.functional.cross_entropy(logits, torch.from_numpy(batch.ids[:, 1:])[is_answer])
        take_step(model, optimizers, loss + 0.3 * digit_loss, step)
        if step % 25 == 0:
            click.echo(json.dumps({"step": step, "share": round(progress, 3), "loss": float(loss), "seen": float(digit_loss)}), err=True)
        step += 1
    return step


def train_drafter(model: Any, stream: Iterator[Batch], minutes: float) -> tuple[Any, int]:
    """Distils a drafter from the target's answers; returns it and the number of steps."""
    recipe = drafting.DrafterRecipe(hidden_size=32, intermediate_size=96, num_centroids=64, top_centroids=8)
    text = model.model.language_model
    target: Any = SimpleNamespace(config=text.config, model=text, lm_head=model.lm_head)
    drafter = Gemma4AssistantForCausalLM._from_config(drafting.config_for(recipe, text.config), attn_implementation="eager")
    drafting.initialise(drafter, text.embed_tokens.weight.float(), SEED)
    model.requires_grad_(False)
    optimizers, step = optimizers_of(drafter), 0
    for progress in shares(minutes):
        set_rates(optimizers, rate_at(progress, 0.02, 0.6))
        batch = next(stream)
        ids, answers = torch.from_numpy(batch.ids), torch.from_numpy(batch.answers)
        with torch.no_grad():
            output = model.model(**inputs(batch, model.config.image_token_id), use_cache=False, return_shared_kv_states=True)
        rows = drafting.TargetRows(output.last_hidden_state, dict(output.shared_kv_states), torch.empty(0))
        states = drafting.draft_states(drafter, target, ids, rows, recipe.draft_steps)
        loss = drafting.answer_loss(drafter, states, ids, answers)
        value = take_step(drafter, optimizers, loss, step)
        if step % 25 == 0:
            click.echo(json.dumps({"drafter step": step, "share": round(progress, 3), "loss": round(value, 4)}), err=True)
        step += 1
    return drafter.eval(), step


@torch.no_grad()
def right_answers(model: Any, tokenizer: Tokenizer, count: int = 60) -> dict[str, float]:
    """Returns the share of whole answers that are right at every token, with pictures and in words, on unseen scenes' drawings."""
    random, right = np.random.default_rng(SEED + 1), {"pictures": 0, "words": 0}
    size = lengths(tokenizer)
    for _ in range(count):
        scene = random_scene(random)
        for kind in right:
            each = example(tokenizer, scene, "What is this?", draw(scene, random) if kind == "pictures" else None)
            ids = np.zeros((1, size[kind == "pictures"]), np.int64)
            ids[0, : len(each.ids)] = each.ids
            pixels = (each.image.patches()[None], each.image.positions()[None]) if each.image else (None, None)
            batch = Batch(ids, ids > 0, np.array([labels(scene)]), *pixels)
            chosen = model(**inputs(batch, model.config.image_token_id), use_cache=False).logits[0].argmax(-1).numpy()
            begin = len(each.ids) - each.answer
            right[kind] += bool((chosen[begin - 1 : len(each.ids) - 1] == ids[0, begin : len(each.ids)]).all())
    return {kind: hits / count for kind, hits in right.items()}


@click.command()
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder for the checkpoints target and drafter.")
@click.option("--minutes", type=float, default=6.0, show_default=True, help="Time for the target.")
@click.option("--drafter-minutes", type=float, default=3.0, show_default=True, help="Time for the drafter.")
@click.option("--batch", "size", type=int, default=8, show_default=True, help="Examples of a step.")
def main(output: Path, minutes: float, drafter_minutes: float, size: int) -> None:
    """Trains and writes the pair."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # the products are too small for more
    tokenizer = write_tokenizer(output / "target")
    model = Gemma4ForConditionalGeneration._from_config(target_config(), attn_implementation="sdpa")
    initialise(model, SEED)
    with torch.no_grad():
        model.model.vision_tower.patch_embedder.position_embedding_table.normal_(std=0.3)
    stream = batches(tokenizer, size, lengths(tokenizer), SEED)
    steps = train_target(model, stream, minutes)
    model.eval()
    facts: dict[str, Any] = {"steps": steps, "right": right_answers(model, tokenizer)}
    click.echo(json.dumps(facts), err=True)
    model.to(torch.bfloat16).save_pretrained(output / "target")
    processor = {"image_processor": {"image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0], "image_seq_length": 280}}
    (output / "target" / "processor_config.json").write_text(json.dumps(processor))
    drafter, facts["drafter steps"] = train_drafter(model.float(), stream, drafter_minutes)
    write_tokenizer(output / "drafter")
    drafter.to(torch.bfloat16).save_pretrained(output / "drafter")
    for role in ("target", "drafter"):
        (output / role / "generation_config.json").unlink(missing_ok=True)
    (output / "trained.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
