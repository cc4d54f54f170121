"""The drafter at all positions of a text at once, as it drafts: several steps at a constant position, on the target's own rows. Its loss,
and how many drafts a text confirms.

At position n the drafter sees token n, the target's hidden row n-1 and the K/V rows before n; its j-th step predicts token n+j. Step j is
one forward over all positions, with the tokens shifted by j-1. Imports torch: import it only where a drafter is trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edge_export.tuning.texts import Tokens

_MASKED = -1e9
# Each further step of a draft counts a little less: it is read only if those before it were accepted.
_STEP_WEIGHT = 0.9
_CENTROID_WEIGHT = 0.2
RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Positions `first` to `first + count - 1` of each text, and the draft steps from each."""

    first: int
    count: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class TargetRows:
    """What the drafter reads, for tokens [B, T]: embedded and hidden rows [B, T, H], K/V by layer type [B, heads, T, d].

    `logits` [B, count + steps - 1, V] begin at the segment's first position.
    """

    embedded: Any
    hidden: Any
    shared: dict[str, tuple[Any, Any]]
    logits: Any


def target_rows(target: Any, tokens: Any, segment: Segment) -> TargetRows:
    """Runs the target once over tokens [B, T]."""
    kept = torch.arange(segment.first, segment.first + segment.count + segment.steps - 1)
    with torch.no_grad():
        output = target(input_ids=tokens, use_cache=False, output_hidden_states=True, return_shared_kv_states=True, logits_to_keep=kept)
        embedded = target.get_input_embeddings()(tokens)
    return TargetRows(
        embedded=embedded,
        hidden=output.hidden_states[-1],
        shared=dict(output.shared_kv_states),
        logits=output.logits.float(),
    )


def _masks(segment: Segment, length: int, window: int) -> dict[str, Any]:
    """Additive masks [1, 1, count, T]: position n sees the rows before n only, at most window - 1 of them on sliding layers."""
    back = torch.arange(segment.first, segment.first + segment.count)[:, None] - torch.arange(length)[None, :]
    full = torch.where(back > 0, 0.0, _MASKED)
    sliding = torch.where((back > 0) & (back < window), 0.0, _MASKED)
    return {"full_attention": full[None, None], "sliding_attention": sliding[None, None]}


def draft_states(drafter: Any, rows: TargetRows, segment: Segment) -> Iterator[Any]:
    """Yields the drafter's normed state [B, count, hidden] of each step; entry i of step j (from 1) predicts token first + i + j."""
    first, last = segment.first, segment.first + segment.count
    masks = _masks(segment, rows.hidden.shape[1], drafter.config.get_text_config().sliding_window)
    hidden = rows.hidden[:, first - 1 : last - 1]
    for step in range(segment.steps):
        embedded = rows.embedded[:, first + step : last + step]
        state = drafter.model(
            inputs_embeds=drafter.pre_projection(torch.cat([embedded, hidden], dim=-1)),
            attention_mask=masks,
            position_ids=torch.arange(first, last)[None],
            shared_kv_states=dict(rows.shared),
            use_cache=False,
        ).last_hidden_state
        hidden = drafter.post_projection(state)
        yield state


def distillation_loss(drafter: Any, rows: TargetRows, segment: Segment) -> Any:
    """Half KL to the target's distribution, half cross-entropy to its choice, summed over steps; and the centroids' own loss."""
    teacher, choice = torch.log_softmax(rows.logits, dim=-1), rows.logits.argmax(-1)
    embedder = getattr(drafter, "masked_embedding", None)
    total = torch.zeros(())
    for step, state in enumerate(draft_states(drafter, rows, segment)):
        expected, label = teacher[:, step : step + segment.count], choice[:, step : step + segment.count].flatten()
        student = torch.log_softmax(drafter.lm_head(state).float(), dim=-1)
        divergence = nn.functional.kl_div(student, expected, log_target=True, reduction="none").sum(-1).mean()
        loss = 0.5 * divergence + 0.5 * nn.functional.nll_loss(student.flatten(0, 1), label)
        if embedder is not None:
            clusters = embedder.centroids(state).float().flatten(0, 1)
            loss = loss + _CENTROID_WEIGHT * nn.functional.cross_entropy(clusters, _cluster_of(embedder)[label])
        total = total + loss * _STEP_WEIGHT**step
    return total


def _cluster_of(embedder: Any) -> Any:
    """The centroid [V] of each token."""
    order = embedder.token_ordering.long()
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)) // embedder.vocab_size_per_centroid)


def greedy_choice(drafter: Any, state: Any) -> Any:
    """The drafted token [B, P] for states [B, P, hidden]; with ordered embeddings the best token of the best centroids."""
    logits = drafter.lm_head(state).float()
    embedder = getattr(drafter, "masked_embedding", None)
    if embedder is not None:
        best = embedder.centroids(state).topk(embedder.centroid_intermediate_top_k, dim=-1).indices
        allowed = torch.zeros(*state.shape[:2], embedder.num_centroids, dtype=torch.bool).scatter_(-1, best, True)
        logits = logits.masked_fill(~allowed[..., _cluster_of(embedder)], -math.inf)
    return logits.argmax(-1)


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """Drafted and accepted tokens of each text, int64 [texts]."""

    drafted: NDArray[np.int64]
    accepted: NDArray[np.int64]

    @property
    def rate(self) -> float:
        """Accepted / drafted."""
        return float(self.accepted.sum() / self.drafted.sum())


def acceptance(target: Any, drafter: Any, texts: Tokens, *, prompt: int, length: int, batch: int) -> Accepted:
    """Walks rounds of `length` drafts over texts [N, T], after their first `prompt` tokens.

    A round at position n accepts the longest prefix of its drafts that the text confirms, and moves on by that plus one.
    """
    segment = Segment(first=prompt - 1, count=texts.shape[1] - length - prompt + 1, steps=length)
    drafted, accepted = [], []
    for begin in range(0, len(texts), batch):
        for run in _confirmed(target, drafter, torch.from_numpy(texts[begin : begin + batch]), segment):
            at = rounds = confirmed = 0
            while at < segment.count:
                rounds, confirmed, at = rounds + 1, confirmed + int(run[at]), at + int(run[at]) + 1
            drafted.append(rounds * length)
            accepted.append(confirmed)
    return Accepted(drafted=np.array(drafted), accepted=np.array(accepted))


def _confirmed(target: Any, drafter: Any, tokens: Any, segment: Segment) -> Tokens:
    """Returns how many drafts from each position of the segment the text confirms, [N, count]."""
    first, last = segment.first, segment.first + segment.count
    with torch.inference_mode():
        rows = target_rows(target, tokens, segment)
        states = enumerate(draft_states(drafter, rows, segment), start=1)
        right = [greedy_choice(drafter, state) == tokens[:, first + step : last + step] for step, state in states]
        lengths: Tokens = torch.stack(right).long().cumprod(0).sum(0).numpy()
    return lengths


def gain(before: Accepted, after: Accepted) -> tuple[float, float]:
    """Returns the 95% interval of the difference of two acceptance rates on the same texts, by bootstrap over texts."""
    chosen = np.random.default_rng(1).integers(len(before.drafted), size=(RESAMPLES, len(before.drafted)))
    rates = [counts.accepted[chosen].sum(1) / counts.drafted[chosen].sum(1) for counts in (after, before)]
    low, high = np.quantile(rates[0] - rates[1], (0.025, 0.975))
    return float(low), float(high)
