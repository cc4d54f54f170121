"""Requests that a session runs to check or time itself: whether drafts change the output, and how long an image takes.

One row and several rows may go through different kernels, whose last bits differ. Where the two best logits are that close, the most likely
token can change. The logit gap tells such a tie from a fault.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from edge_runtime.drafting.policies import Fixed
from edge_runtime.errors import RequestError
from edge_runtime.media.image import SIDE, Image
from edge_runtime.session.generation import Generation
from edge_runtime.session.session import Session
from edge_runtime.session.stats import DecodeStats


@dataclass(frozen=True, kw_only=True)
class LosslessReport:
    """`equal`, or the first divergence: position in the output, both token ids, and the difference of their logits in plain decoding."""

    equal: bool
    tokens: int
    position: int | None = None
    plain_token: int | None = None
    draft_token: int | None = None
    logit_gap: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self) -> str:
        """Returns the report as one sentence."""
        if self.equal:
            return f"lossless: all {self.tokens} tokens equal plain decoding"
        return (
            f"first divergence at output token {self.position}: {self.draft_token} instead of {self.plain_token}, "
            f"logits {self.logit_gap:.3g} apart in plain decoding"
        )


def check_lossless(session: Session, generation: Generation) -> LosslessReport:
    """Reruns a finished request without drafts and compares the tokens. Raises RequestError if its sampling is not repeatable."""
    options = generation.options
    if not options.repeatable:
        raise RequestError("sampled tokens differ from run to run; compare at temperature 0, or with a seed")
    plain = session.generate(
        generation.prompt_input,
        max_tokens=len(generation.tokens),
        policy=Fixed(0),
        sampling=options.sampling,
        acceptance=options.acceptance,
        constraint=options.constraint,
    )
    for _ in plain.rounds():
        pass
    for position, (expected, got) in enumerate(zip(plain.tokens, generation.tokens, strict=False)):
        if expected != got:
            gap = _logit_gap(session, [*plain.prompt, *plain.tokens[:position]], expected, got)
            return LosslessReport(
                equal=False, tokens=len(generation.tokens), position=position, plain_token=expected, draft_token=got, logit_gap=gap
            )
    return LosslessReport(equal=len(plain.tokens) == len(generation.tokens), tokens=len(generation.tokens))


def _logit_gap(session: Session, context: list[int], first: int, second: int) -> float:
    with session.exclusive():
        session.target.rollback(0)
        session.target.prefill(context[:-1])
        row = session.target.verify(context[-1:])[0]
        return float(row[first] - row[second])


QUESTION = "What is this?"


def square(budget: int, seed: int) -> Image:
    """Returns a square image of noise within the budget; each seed gives another image, whose rows no cache holds."""
    side = SIDE * math.isqrt(budget)
    return Image(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def time_image(session: Session, image: Image) -> DecodeStats:
    """Runs a request about an image up to its first token; the first of a session loads the encoder too."""
    generation = session.generate(session.media_prompt(QUESTION, [image]), max_tokens=1, draft_length=0)
    for _ in generation.rounds():
        pass
    return generation.stats
