"""Scripted stand-ins for the backend seam: as small as the seam, deterministic, and strict about how they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.manifest import Architecture, CacheLayout, LayerCache, Manifest, RuntimeSettings
from edge_runtime.interfaces import DraftRequest, DraftSampler, KvRows, Logits, ShouldContinue
from edge_runtime.session.batch import Sessions
from edge_runtime.session.session import Session, SessionParts

VOCABULARY = 17


def next_token(context: Sequence[int]) -> int:
    """What the scripted target says after `context`: depends on all of it, so a wrong cache shows."""
    state = 7
    for token in context:
        state = (state * 31 + token + 3) % 1009
    return state % VOCABULARY


def one_hot(token: int, size: int, logit: float = 1.0) -> Logits:
    """A row that says `token`."""
    row = np.zeros(size, dtype=np.float32)
    row[token] = logit
    return row


class ScriptedTarget:
    """A target whose greedy choice is `next_token` of everything in its cache. Records the rows it computed.

    Each verify overwrites the last one's logits, as real ones do.
    """

    def __init__(self, context: int = 512, rewind_slack: int = 12) -> None:
        self.context = context
        self.rewind_slack = rewind_slack
        self.cache: list[int] = []
        self.rows: list[int] = []
        self._logits = np.zeros((0, 0), dtype=np.float32)
        self.closed = False

    @property
    def length(self) -> int:
        return len(self.cache)

    @property
    def tokens(self) -> NDArray[np.int32]:
        return np.array(self.cache, dtype=np.int32)

    @property
    def rollback_floor(self) -> int:
        return max(0, len(self.cache) - self.rewind_slack)

    def prefill(self, tokens: Sequence[int], *, rows_read: int = 1) -> None:
        self._append(tokens)

    def verify(self, tokens: Sequence[int]) -> Logits:
        assert tokens, "verify needs a row"
        self._logits.fill(np.nan)
        start = len(self.cache)
        self._append(tokens)
        self.rows.append(len(tokens))
        self._logits = np.stack([self.row(self.cache[: start + i + 1]) for i in range(len(tokens))])
        return self._logits

    def row(self, context: Sequence[int]) -> Logits:
        """The logits behind `context`."""
        return one_hot(next_token(context), VOCABULARY)

    def rollback(self, length: int) -> None:
        assert 0 <= length <= len(self.cache)
        assert length == 0 or len(self.cache) - length <= self.rewind_slack, "rolled back further than the slack"
        del self.cache[length:]

    def close(self) -> None:
        self.closed = True

    def _append(self, tokens: Sequence[int]) -> None:
        assert len(self.cache) + len(tokens) <= self.context, "wrote past the context"
        self.cache.extend(tokens)


class CopiedRows:
    """Makes a scripted target an `interfaces.SavableTarget`, whose rows are the bytes of their tokens."""

    kv_type = "scripted"
    row_bytes = (4, 0)
    sliding_rows = 0
    cache: list[int]

    def state(self, first: int = 0) -> KvRows:
        rows = np.array(self.cache[first:], "<i4").view(np.uint8).reshape(-1, 4)
        return KvRows(rows, rows[:, :0])

    def restore(self, tokens: Sequence[int], rows: KvRows) -> None:
        self.cache[:] = rows.full.copy().view("<i4").reshape(-1).tolist()
        assert self.cache == list(tokens), "rows of other tokens"


class SavableScriptedTarget(CopiedRows, ScriptedTarget):
    """A scripted target whose rows can be copied out and put back."""


class ScriptedDrafter:
    """Drafts through `guess(context, position)`; sees the target's cache as the real drafter does, and must not change it."""

    stepwise = False

    def __init__(self, target: ScriptedTarget, guess: Callable[[list[int], int], int]) -> None:
        self._target = target
        self._guess = guess
        self.lengths: list[int] = []
        self.closed = False

    def draft(
        self, last: int, draft_length: int, sampler: DraftSampler | None = None, should_continue: ShouldContinue | None = None
    ) -> list[int]:
        context = [*self._target.cache, last]
        drafts: list[int] = []
        for position in range(draft_length):
            drafts.append(self._guess(context + drafts, position))
        self.lengths.append(draft_length)
        return drafts

    def close(self) -> None:
        self.closed = True


Spend = Callable[[str, int], None]


class TimedTarget(ScriptedTarget):
    """Tells each phase and its rows to `spend`, which moves a clock."""

    def __init__(self, spend: Spend) -> None:
        super().__init__()
        self._spend = spend

    def prefill(self, tokens: Sequence[int], *, rows_read: int = 1) -> None:
        self._spend("prefill", len(tokens))
        super().prefill(tokens, rows_read=rows_read)

    def verify(self, tokens: Sequence[int]) -> Logits:
        self._spend("verify", len(tokens))
        return super().verify(tokens)


class TimedDrafter(ScriptedDrafter):
    """Tells each draft and its length to `spend`."""

    def __init__(self, target: ScriptedTarget, spend: Spend) -> None:
        super().__init__(target, lambda context, _: next_token(context))
        self._spend = spend

    def draft(
        self, last: int, draft_length: int, sampler: DraftSampler | None = None, should_continue: ShouldContinue | None = None
    ) -> list[int]:
        self._spend("draft", draft_length)
        return super().draft(last, draft_length, sampler, should_continue)


def plain_greedy(prompt: Sequence[int], max_tokens: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """The reference: one token at a time."""
    context, out = list(prompt), []
    while len(out) < max_tokens:
        token = next_token(context)
        context.append(token)
        out.append(token)
        if token in stop:
            break
    return out


class LetterVocabulary:
    """Token ids as letters; token 16 is the first half of a two-byte character, 15 its second half."""

    control_tokens: ClassVar[dict[str, int]] = {}
    bos = eos = -1

    def __init__(self, eog: frozenset[int] = frozenset()) -> None:
        self.eog_tokens = eog

    def encode(self, text: str) -> list[int]:
        return [ord(c) % VOCABULARY for c in text]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return {16: b"\xc3", 15: b"\xa9"}.get(token, bytes([97 + token]))


FULL = LayerCache(kv_heads=1, head_dim=4, dtype="f16", capacity=64, window=None, owner_layers=(0,))
MANIFEST = Manifest(
    schema_version=1,
    created_by="test",
    created_at="2026-01-01T00:00:00Z",
    sources={},
    architecture=Architecture(
        family="custom",
        hidden_size=8,
        layers=1,
        vocab_size=17,
        context_length=64,
        parameters=1,
        drafter_hidden_size=4,
        drafter_layers=1,
        drafter_parameters=1,
        ordered_embeddings=False,
    ),
    cache_layout=CacheLayout(sliding=None, full=FULL, layer_owners=(0,), drafter_sources=(0,), rewind_slack=12),
    files=(),
    runtime=RuntimeSettings(draft_length=2, context=64),
)


def make_session(
    guess: Callable[[list[int], int], int] | None = None, eog: frozenset[int] = frozenset(), context: int = 512, **parts: Any
) -> Session:
    """A session over scripted models; the drafter is always right unless told otherwise. `parts` go over its own."""
    target = ScriptedTarget(context=context)
    drafter = ScriptedDrafter(target, guess or (lambda c, _: next_token(c)))
    own = {"bundle": Bundle(Path("nowhere"), MANIFEST), "target": target, "drafter": drafter, "vocabulary": LetterVocabulary(eog)}
    return Session(SessionParts(**own | parts))


class ScriptedBatch:
    """Scripted sequences; counts how many rows each common forward had."""

    def __init__(self, count: int, context: int = 512, kind: type[ScriptedTarget] = ScriptedTarget) -> None:
        self.targets = [kind(context=context) for _ in range(count)]
        self.drafters = [ScriptedDrafter(target, lambda c, i: next_token(c) if i < 2 else 0) for target in self.targets]
        self.forwards: list[list[int]] = []

    def draft_all(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self.drafters[request.sequence].draft(request.last, request.draft_length, request.sampler) for request in requests]

    def verify_all(self, batches: Sequence[tuple[int, Sequence[int]]]) -> list[Logits]:
        self.forwards.append([len(tokens) for _, tokens in batches])
        return [self.targets[number].verify(tokens) for number, tokens in batches]

    def close(self) -> None:
        for target in self.targets:
            target.close()


def scripted_sessions(count: int, context: int = 512, kind: type[ScriptedTarget] = ScriptedTarget) -> tuple[ScriptedBatch, Sessions]:
    batch = ScriptedBatch(count, context, kind)
    own = zip(batch.targets, batch.drafters, strict=True)
    return batch, Sessions([make_session(target=target, drafter=drafter) for target, drafter in own], batch)
