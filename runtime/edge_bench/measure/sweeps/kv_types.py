"""Measures KV cache types: acceptance, tokens per second, bytes, and the change of the target's next-token distributions.

Acceptance and distributions are measured on the same texts for every type, generated with a float16 cache: each type by itself would
generate another text, and some texts are easier to draft than others.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from edge_bench.measure.records import KvTypeCost
from edge_runtime.bundle.kv_types import DEFAULT_KV_TYPE, KV_TYPES, KvType
from edge_runtime.decoding.quality import read_reference, row_figures, write_reference
from edge_runtime.drafting.policies import Fixed
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import Logits
from edge_runtime.planning.memory import BATCH, MemoryRequest, cache_bytes
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session

# Prompt and greedy tokens.
Text = tuple[list[int], list[int]]


def measure_kv_types(
    folder: Path | str,
    prompts: Sequence[str],
    *,
    kv_types: Sequence[KvType] = KV_TYPES,
    max_tokens: int = 64,
    draft_length: int = 3,
    threads: int | None = None,
    context: int | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> list[KvTypeCost]:
    """Measures each type over texts of `max_tokens` tokens after `prompts`; float16 always comes first.

    Temporary files take 4 bytes x tokens x vocabulary. Raises the errors of `open_session`, and RequestError without prompts.
    """
    if not prompts:
        raise RequestError("there is no prompt to measure with; give at least one")
    costs: list[KvTypeCost] = []
    texts: list[Text] = []
    with tempfile.TemporaryDirectory(prefix="edge-mtp-") as scratch:
        for kv_type in (DEFAULT_KV_TYPE, *(kind for kind in kv_types if kind != DEFAULT_KV_TYPE)):
            with open_session(
                folder, threads=threads, context=context, drafter="dense", kv_type=kv_type, check="none", notify=notify
            ) as session:
                written, seconds = _write(session, prompts, max_tokens, draft_length)
                texts = texts or written
                speed = sum(len(tokens) for _, tokens in written) / seconds if seconds else 0.0
                costs.append(_cost(session, kv_type, texts, draft_length, Path(scratch), speed))
    return costs


def _write(session: Session, prompts: Sequence[str], max_tokens: int, draft_length: int) -> tuple[list[Text], float]:
    """Returns the texts, and the seconds their decoding took."""
    texts, seconds = [], 0.0
    for prompt in prompts:
        generation = session.generate(prompt, max_tokens=max_tokens, policy=Fixed(draft_length))
        for _ in generation.rounds():
            pass
        texts.append((generation.prompt, generation.tokens))
        seconds += generation.stats.decode_seconds
    return texts, seconds


def _cost(session: Session, kv_type: KvType, texts: Sequence[Text], draft_length: int, folder: Path, speed: float) -> KvTypeCost:
    """Compares a type with the logits of float16, which are in `folder`; of float16 puts them there."""
    counts, kl, same = Counter[str](), list[float](), list[bool]()
    for number, (prompt, tokens) in enumerate(texts):
        if not tokens:  # it ended at once
            continue
        rows, ids = _rows(session, prompt, tokens, draft_length, counts), [prompt[-1], *tokens]
        if kv_type == DEFAULT_KV_TYPE:
            write_reference(folder, str(number), ids[:-1], rows)
        else:
            figures = row_figures(read_reference(folder, str(number)).logits, rows, ids, first=0)
            kl, same = [*kl, *figures.kl], [*same, *figures.agrees]
    request = MemoryRequest(
        context=session.target.context,
        kv_type=kv_type,
        sequences=1,
        batch=BATCH,
        verify_rows=1,
        drafter=None,
        repack=False,
        gives_back=False,
    )
    return KvTypeCost(
        kv_type=kv_type,
        cache_bytes=cache_bytes(session.bundle.manifest.cache_layout, request),
        tokens=sum(len(tokens) for _, tokens in texts),
        acceptance_rate=counts["accepted"] / counts["drafted"] if counts["drafted"] else 0.0,
        tokens_per_second=speed,
        kl_mean=float(np.mean(kl or [0.0])),
        kl_max=max(kl, default=0.0),
        same_best=float(np.mean(same or [True])),
    )


def _rows(session: Session, prompt: list[int], tokens: list[int], draft_length: int, counts: Counter[str]) -> Iterator[Logits]:
    """Yields the row of logits [1, vocabulary] before each token of a text. Drafts at each place are counted, and dropped."""
    target, drafter = session.target, session.drafter
    target.rollback(0)
    target.prefill(prompt[:-1])
    for last in [prompt[-1], *tokens[:-1]]:
        length = target.length
        drafts = drafter.draft(last, min(draft_length, target.context - length - 1)) if drafter else []
        logits = target.verify([last, *drafts])
        counts.update(drafted=len(drafts), accepted=_accepted(drafts, logits))
        yield logits[:1]
        target.rollback(length + 1)


def _accepted(drafts: Sequence[int], logits: Logits) -> int:
    """Returns how many drafts greedy verification accepts."""
    for i, draft in enumerate(drafts):
        if int(logits[i].argmax()) != draft:
            return i
    return len(drafts)
