"""The texts that a drafter is tuned on and judged by: what the target itself writes after pieces of the user's text.

Imports torch: import it only where a drafter is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edge_export.errors import ExportError

Tokens = NDArray[np.int64]
# The text is cut into so many parts; every HELD_OUT-th is only used to judge the drafter.
PARTS, HELD_OUT = 20, 5


def parts_of(text: str) -> tuple[list[str], list[str]]:
    """Returns the parts of a text to train on, and those to judge by; parts end where lines do."""
    lines, parts = text.splitlines(keepends=True), [""]
    for line in lines:
        if len(parts[-1]) >= len(text) / PARTS and len(parts) < PARTS:
            parts.append("")
        parts[-1] += line
    held = [part for index, part in enumerate(parts) if index % HELD_OUT == HELD_OUT - 1]
    return [part for index, part in enumerate(parts) if index % HELD_OUT != HELD_OUT - 1], held


def prompts_from(parts: Sequence[str], tokenizer: Any, *, length: int, count: int, random: np.random.Generator) -> Tokens:
    """Returns `count` prompts [count, length] that begin at a line of a part, or inside a long one. Raises ExportError if the text is too
    short for one.
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
    """Continues prompts [N, P] to texts [N, length] without the `banned` tokens; temperature 0 is greedy."""
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.from_numpy(prompts)
    cache, step = DynamicCache(config=target.config.get_text_config()), tokens
    with torch.inference_mode():
        while tokens.shape[1] < length:
            # A place: by a number transformers 5.24 cuts rows before layers that share K/V, also per-layer inputs where there are none.
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
