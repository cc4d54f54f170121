"""Measures KV cache types: acceptance, tokens per second, bytes, and the change of the target's next-token distributions.

Acceptance and distributions are measured on the same texts for every type, generated with a float16 cache: each type by itself would
generate another text, and some texts are easier to draft than others.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_bench.measure.records import KvTypeCost
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.kv_types import DEFAULT_KV_TYPE, KV_TYPES, KvType
from edge_runtime.decoding.quality import divergence_of, log_softmax
from edge_runtime.drafting.policies import Fixed
from edge_runtime.errors import RequestError
from edge_runtime.planning.memory import BATCH, MemoryRequest, cache_bytes
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """The results of one type over the texts: log-probabilities [tokens, vocabulary] and counts."""

    rows: NDArray[np.float32]
    drafted: int
    accepted: int
    seconds: float
    written: int


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

    Temporary files take 8 bytes x tokens x vocabulary. Raises the errors of `open_session`, and RequestError without prompts.
    """
    if not prompts:
        raise RequestError("there is no prompt to measure with; give at least one")
    costs: list[KvTypeCost] = []
    texts: list[tuple[list[int], list[int]]] = []
    reference: _Reading | None = None
    with tempfile.TemporaryDirectory(prefix="edge-mtp-") as scratch:
        for kv_type in (DEFAULT_KV_TYPE, *(kind for kind in kv_types if kind != DEFAULT_KV_TYPE)):
            with open_session(
                folder, threads=threads, context=context, drafter="dense", kv_type=kv_type, check="none", notify=notify
            ) as session:
                written, seconds = _write(session, prompts, max_tokens, draft_length)
                texts = texts or written
                name = Path(scratch) / ("reference" if reference is None else "rows")
                reading = _read(session, texts, draft_length, name, seconds, sum(len(tokens) for _, tokens in written))
                reference = reference or reading
                costs.append(_cost(session.bundle, session.target.context, kv_type, reference, reading))
    return costs


def _write(session: Session, prompts: Sequence[str], max_tokens: int, draft_length: int) -> tuple[list[tuple[list[int], list[int]]], float]:
    """Returns prompt and greedy tokens of each text, and the seconds their decoding took."""
    texts, seconds = [], 0.0
    for prompt in prompts:
        generation = session.generate(prompt, max_tokens=max_tokens, policy=Fixed(draft_length))
        for _ in generation.rounds():
            pass
        texts.append((generation.prompt, generation.tokens))
        seconds += generation.stats.decode_seconds
    return texts, seconds


def _read(
    session: Session, texts: Sequence[tuple[list[int], list[int]]], draft_length: int, path: Path, seconds: float, written: int
) -> _Reading:
    """Follows the texts token by token: drafts and verifies at each position, then continues with the text whatever was accepted."""
    vocabulary = session.bundle.manifest.architecture.vocab_size
    count = sum(len(tokens) for _, tokens in texts)
    rows = _mapped(path, count, vocabulary)
    drafted = accepted = done = 0
    for prompt, tokens in texts:
        for drafts, logits in _steps(session, prompt, tokens, draft_length):
            rows[done] = log_softmax(logits[0])
            done += 1
            drafted += len(drafts)
            accepted += _accepted(drafts, logits)
    return _Reading(rows=rows, drafted=drafted, accepted=accepted, seconds=seconds, written=written)


def _mapped(path: Path, count: int, vocabulary: int) -> NDArray[np.float32]:
    """Returns rows in a mapped file. Its space is reserved first, as writing to a mapped page on a full disk would kill the process."""
    size = count * vocabulary * np.dtype(np.float32).itemsize
    try:
        with path.open("wb") as file:
            file.truncate(size)
            _reserve(file.fileno(), size)
    except OSError as error:
        raise RequestError(
            f"the temporary folder {path.parent.parent} has no room for {size / 1e6:.0f} MB of log-probabilities "
            f"({error.strerror}); choose another with"
            " TMPDIR, or measure fewer tokens"
        ) from error
    return np.memmap(path, np.float32, "r+", shape=(count, vocabulary))


def _reserve(descriptor: int, size: int) -> None:
    """Reserves `size` bytes if the system supports it: macOS and some file systems do not."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def _steps(session: Session, prompt: list[int], tokens: list[int], draft_length: int) -> Iterator[tuple[list[int], NDArray[np.float32]]]:
    target, drafter = session.target, session.drafter
    target.rollback(0)
    target.prefill(prompt[:-1])
    for last in [prompt[-1], *tokens[:-1]]:
        length = target.length
        drafts = drafter.draft(last, min(draft_length, target.context - length - 1)) if drafter else []
        yield drafts, target.verify([last, *drafts])
        target.rollback(length + 1)


def _accepted(drafts: Sequence[int], logits: NDArray[np.float32]) -> int:
    """Returns how many drafts greedy verification accepts."""
    for i, draft in enumerate(drafts):
        if int(logits[i].argmax()) != draft:
            return i
    return len(drafts)


def _cost(bundle: Bundle, context: int, kv_type: KvType, reference: _Reading, reading: _Reading) -> KvTypeCost:
    divergences, same = [], 0
    for p, q in zip(reference.rows, reading.rows, strict=True):
        divergences.append(divergence_of(p.astype(np.float64), q.astype(np.float64)))
        same += int(p.argmax() == q.argmax())
    request = MemoryRequest(context=context, kv_type=kv_type, sequences=1, batch=BATCH, verify_rows=1, drafter=None, repack=False)
    return KvTypeCost(
        kv_type=kv_type,
        cache_bytes=cache_bytes(bundle.manifest.cache_layout, request),
        tokens=len(divergences),
        acceptance_rate=reading.accepted / reading.drafted if reading.drafted else 0.0,
        tokens_per_second=reading.written / reading.seconds if reading.seconds else 0.0,
        kl_mean=float(np.mean(divergences)),
        kl_max=float(np.max(divergences)),
        same_best=same / len(divergences),
    )
