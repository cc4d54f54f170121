"""Scripted sequences that share forwards, and sessions on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edge_runtime.bundle.bundle import Bundle
from edge_runtime.interfaces import DraftRequest, Logits
from edge_runtime.session.batch import Sessions
from edge_runtime.session.session import Session, SessionParts
from scripted import MANIFEST, LetterVocabulary, ScriptedDrafter, ScriptedTarget, next_token


class ScriptedBatch:
    """Scripted sequences; counts how many rows each common forward had."""

    def __init__(self, count: int, context: int = 512) -> None:
        self.targets = [ScriptedTarget(context=context) for _ in range(count)]
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


def scripted_sessions(count: int, context: int = 512) -> tuple[ScriptedBatch, Sessions]:
    together = ScriptedBatch(count, context)
    bundle = Bundle(Path("nowhere"), MANIFEST)
    own = zip(together.targets, together.drafters, strict=True)
    return together, Sessions(
        [Session(SessionParts(bundle=bundle, target=target, drafter=drafter, vocabulary=LetterVocabulary())) for target, drafter in own],
        together,
    )
