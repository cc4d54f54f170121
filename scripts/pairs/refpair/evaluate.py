"""Text the target writes itself, and how much of it the drafter foresees: acceptance by draft position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM

from edge_export.tuning import greedy_choice
from refpair.corpus import Document
from refpair.drafter import draft_states, target_rows


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Counts over all rounds: `by_position[i]` rounds accepted draft i (from 0)."""

    rounds: int
    draft_length: int
    by_position: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Accepted / drafted."""
        return sum(self.by_position) / (self.rounds * self.draft_length)

    def to_json(self) -> dict[str, object]:
        """Plain values for the model card."""
        return {
            "rounds": self.rounds,
            "acceptance_rate": round(self.rate, 4),
            "by_position": [round(n / self.rounds, 4) for n in self.by_position],
        }


def prompts_from(documents: list[Document], tokenizer: Tokenizer, length: int, count: int, seed: int) -> np.ndarray:
    """Draws `count` prompts of `length` tokens that begin at a line of a document. Returns uint16 [count, length]."""
    generator = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    while len(prompts) < count:
        lines = documents[generator.integers(len(documents))].text.splitlines(keepends=True)
        start = int(generator.integers(max(1, len(lines) - 8)))
        ids = tokenizer.encode("".join(lines[start : start + 60]), add_special_tokens=False).ids
        if len(ids) >= length - 1:
            prompts.append([2, *ids[: length - 1]])
    return np.array(prompts, dtype=np.uint16)


@torch.no_grad()
def measure_acceptance(
    target: Gemma4ForCausalLM, drafter: Gemma4AssistantForCausalLM, texts: np.ndarray, prompt_length: int, draft_length: int
) -> Acceptance:
    """Walks rounds over greedy texts [N, T] the target wrote after `prompt_length` tokens, in float32, with the sparse head.

    A round at position n accepts the longest prefix of its drafts that the text confirms and moves on by that plus one.
    """
    rounds, by_position = 0, [0] * draft_length
    for text in texts:
        tokens = torch.from_numpy(text.astype(np.int64))[None]
        states = draft_states(drafter, target, tokens, target_rows(target, tokens), draft_length)
        drafts = torch.stack([greedy_choice(drafter, s)[0] for s in states])
        n, end = prompt_length - 1, tokens.shape[1] - draft_length - 1
        while n < end:
            accepted = 0
            while accepted < draft_length and drafts[accepted, n] == tokens[0, n + accepted + 1]:
                by_position[accepted] += 1
                accepted += 1
            rounds, n = rounds + 1, n + accepted + 1
    return Acceptance(rounds=rounds, draft_length=draft_length, by_position=tuple(by_position))
