"""Log probabilities of emitted tokens, as the target gives them: before temperature, penalties, bias and constraints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge_runtime.decoding.acceptance import LogitRows, VerifyResult
from edge_runtime.decoding.acceptance_rules import AcceptanceRule
from edge_runtime.interfaces import DraftSampler, Logits

MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A token, its log probability in nats, and the likeliest tokens of its position with theirs, likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class LogprobRule:
    """Another rule, whose emitted tokens are recorded with their log probabilities and the `top` likeliest tokens of each position."""

    def __init__(self, rule: AcceptanceRule, top: int) -> None:
        self.any_prefix = rule.any_prefix
        self._rule = rule
        self._top = top
        self._newest: list[TokenLogprob] = []

    @property
    def sampler(self) -> DraftSampler | None:
        return self._rule.sampler

    def cut(self, drafts: list[int]) -> list[int]:
        return self._rule.cut(drafts)

    def accept(self, drafts: Sequence[int], logits: LogitRows) -> VerifyResult:
        """As the other rule; keeps one record per token of the round."""
        result = self._rule.accept(drafts, logits)
        tokens = [*drafts[: result.accepted], result.next_token]
        self._newest = [token_logprob(logits[position], token, self._top) for position, token in enumerate(tokens)]
        return result

    def take(self, tokens: int) -> list[TokenLogprob]:
        """Returns the records of the first `tokens` tokens of the newest round: a stop may have cut it."""
        newest, self._newest = self._newest[:tokens], []
        return newest


def token_logprob(row: Logits, token: int, top: int) -> TokenLogprob:
    """Returns the record of `token` in a row of logits, float32 [vocabulary]."""
    wide = row.astype(np.float64)
    highest = float(wide.max())
    normalizer = highest + float(np.log(np.exp(wide - highest).sum()))
    best: list[int] = []
    if top:
        candidates = np.argpartition(-row, min(top, row.size - 1))[:top]
        best = sorted((int(i) for i in candidates), key=lambda i: (-float(row[i]), i))
    return TokenLogprob(token=token, logprob=float(wide[token]) - normalizer, top=tuple((i, float(wide[i]) - normalizer) for i in best))
