"""Measurements over a range: numbers of concurrent clients, sizes of images, and types of K/V rows."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from edge_bench.measure.records import Concurrency, ImageCost, KvTypeCost, Variant
from edge_bench.measure.request import Prompt
from edge_bench.measure.runners import session_for, start
from edge_devices.energy.protocol import Work, Workload
from edge_devices.energy.windows import ENCODE, PREFILL
from edge_runtime.bundle.gguf_header import DEFAULT_KV_TYPE, KV_TYPES, KvType
from edge_runtime.decoding.quality import read_reference, row_figures, write_reference
from edge_runtime.drafting.policies import Fixed
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import Logits
from edge_runtime.media.encoder_inputs import check_budget
from edge_runtime.planning.memory import BATCH, MemoryRequest, cache_bytes
from edge_runtime.session.batch import Sessions
from edge_runtime.session.generation import Generation
from edge_runtime.session.open import open_session
from edge_runtime.session.self_checks import QUESTION, square, time_image
from edge_runtime.session.session import Session

# Concurrent clients: each sends its next request when its previous one ends.


def alone(session: Session, prompts: Sequence[Prompt], tokens: int) -> list[list[int]]:
    """Returns each prompt's plain greedy output on a single session."""
    outputs = []
    for prompt in prompts:
        generation = session.generate(prompt.ids, max_tokens=tokens, draft_length=0)
        for _ in generation.rounds():
            pass
        outputs.append(generation.tokens)
    return outputs


def run_level(
    sessions: Sessions,
    variant: Variant,
    prompts: Sequence[Prompt],
    expected: Sequence[Sequence[int]],
    tokens: int,
    repeat: int,
) -> Concurrency:
    """Runs every prompt once for each client, in a different order per client. `expected` has the outputs to compare with."""
    clients = [session_for(session, variant) for session in sessions.sessions]
    outputs: dict[int, Sequence[int]] = {}
    generations: list[Generation] = []
    for number in range(len(prompts)):
        for index, session in enumerate(clients):
            which = (number + index) % len(prompts)
            generations.append(start(session, variant, prompts[which].ids, tokens))
            outputs[id(generations[-1])] = expected[which]
    begin = time.perf_counter()
    free = {id(session.target): begin for session in clients}  # when a client's session became free
    last: dict[int, float] = {}
    token_seconds: list[float] = []
    request_seconds = []
    for generation, emitted in sessions.run(generations):
        now, client = time.perf_counter(), id(generation.target)
        if id(generation) in last:  # the first token belongs to the request's latency, not between tokens
            token_seconds += [(now - last[id(generation)]) / len(emitted.tokens)] * len(emitted.tokens)
        last[id(generation)] = now
        if generation.finish_reason is not None:
            request_seconds.append(now - free[client])
            free[client] = now
    return Concurrency(
        clients=len(clients),
        variant=variant,
        repeat=repeat,
        requests=len(generations),
        tokens=sum(len(g.tokens) for g in generations),
        seconds=time.perf_counter() - begin,
        request_seconds=tuple(request_seconds),
        token_seconds=tuple(token_seconds),
        equal=sum(list(outputs[id(g)]) == g.tokens for g in generations),
        compared=len(generations),
    )


# Requests about images of several sizes: the times of encoder and prefill, and workloads for the energy protocol.


def check_sizes(session: Session, budgets: Sequence[int]) -> None:
    """Raises RequestError for a budget that images cannot have, or that does not fit the session."""
    for budget in budgets:
        check_budget(budget)
        rows = session.media_rows(square(budget, 0))
        if rows + len(QUESTION) >= session.target.context:
            raise RequestError(f"an image of {rows} tokens does not fit the context of {session.target.context}; raise --context")


def measure_image(session: Session, budget: int, repeat: int) -> ImageCost:
    """Runs one request up to its first token, with an image that was not encoded before."""
    stats = time_image(session, square(budget, repeat))
    prefill = stats.prefill_seconds - stats.encode_seconds
    return ImageCost(budget=budget, repeat=repeat, rows=stats.media_rows, encode_seconds=stats.encode_seconds, prefill_seconds=prefill)


def image_workloads(session: Session, budgets: Sequence[int]) -> dict[str, Workload]:
    """Returns a workload of such requests for each budget. Its phases are encode, prefill, and the forward of the first token."""
    seeds = itertools.count(1)
    return {f"image {budget}": _requests(session, budget, seeds) for budget in budgets}


def _requests(session: Session, budget: int, seeds: Iterator[int]) -> Workload:
    def work() -> Work:
        stats = time_image(session, square(budget, next(seeds)))
        prefill = stats.prefill_seconds - stats.encode_seconds
        phases = {ENCODE: stats.encode_seconds, PREFILL: prefill, "plain": stats.decode_seconds}
        return Work(emitted_tokens=stats.tokens, prompt_tokens=stats.prompt_tokens, phases=phases)

    return work


# Measures KV cache types: acceptance, tokens per second, bytes, and the change of the target's next-token distributions.
#
# Acceptance and distributions are measured on the same texts for every type, which were generated with a float16 cache. On its own, each
# type would generate another text, and some texts are easier to draft than others.

# The token ids of a prompt, and the greedy tokens after it.
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
) -> Iterator[KvTypeCost]:
    """Measures each type over texts of `max_tokens` tokens after `prompts`; float16 always comes first.

    Yields each result as soon as it is measured, so that a warm machine can rest before the next one. Temporary files take 4 bytes x tokens
    x vocabulary. Raises the errors of `open_session`, and RequestError without prompts.
    """
    if not prompts:
        raise RequestError("there is no prompt to measure with; give at least one")
    texts: list[Text] = []
    with tempfile.TemporaryDirectory(prefix="edge-mtp-") as scratch:
        for kv_type in (DEFAULT_KV_TYPE, *(kind for kind in kv_types if kind != DEFAULT_KV_TYPE)):
            with open_session(
                folder, threads=threads, context=context, drafter="dense", kv_type=kv_type, check="none", notify=notify
            ) as session:
                written, seconds = _write(session, prompts, max_tokens, draft_length)
                texts = texts or written
                speed = sum(len(tokens) for _, tokens in written) / seconds if seconds else 0.0
                cost = _cost(session, kv_type, texts, draft_length, Path(scratch), speed)
            yield cost


def _write(session: Session, prompts: Sequence[str], max_tokens: int, draft_length: int) -> tuple[list[Text], float]:
    """Generates the texts. Returns them and the seconds of decoding."""
    texts, seconds = [], 0.0
    for prompt in prompts:
        generation = session.generate(prompt, max_tokens=max_tokens, policy=Fixed(draft_length))
        for _ in generation.rounds():
            pass
        texts.append((generation.prompt, generation.tokens))
        seconds += generation.stats.decode_seconds
    return texts, seconds


def _cost(session: Session, kv_type: KvType, texts: Sequence[Text], draft_length: int, folder: Path, speed: float) -> KvTypeCost:
    """Compares a type with float16, whose logits are in `folder`. For float16 itself, writes its logits there."""
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
    """Yields the row of logits [1, vocabulary] before each token of a text. Drafts at each position are counted, then dropped."""
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
    """Returns how many of the drafts greedy verification accepts."""
    for i, draft in enumerate(drafts):
        if int(logits[i].argmax()) != draft:
            return i
    return len(drafts)
