"""Distils the MTP drafter from the trained target, as it will run: unrolled over several draft steps at a constant position,
reading the target's own K/V and hidden rows (Gemma4AssistantForCausalLM with ordered embeddings).

At position n the drafter sees token n, the target's hidden row n-1 and the K/V rows before n; its j-th step predicts token n+j.
All positions of a window are trained at once: step j is one forward over the window with the tokens shifted by j-1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import nn
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

from refpair.target import optimizers_for, train_for

MASKED = -1e9


@dataclass(frozen=True, kw_only=True)
class DrafterRecipe:
    """How the drafter is trained. `hidden_size` differs from the target's: llama.cpp refuses equal ones."""

    minutes: float = 40.0
    hidden_size: int = 192
    intermediate_size: int = 512
    num_centroids: int = 64
    top_centroids: int = 8
    draft_steps: int = 4
    batch_size: int = 16
    muon_rate: float = 0.01
    adam_rate: float = 0.002
    warm_up: float = 0.02
    cool_down: float = 0.6
    weight_decay: float = 0.02
    centroid_weight: float = 0.2
    seed: int = 20261121


@dataclass(frozen=True)
class TargetRows:
    """What the drafter reads, for tokens [B, T]: hidden rows [B, T, H], K/V by layer type [B, heads, T, d], logits [B, T, V].

    With `pieces`, token ids [V], the logits are those of these tokens alone.
    """

    hidden: torch.Tensor
    shared: dict[str, tuple[torch.Tensor, torch.Tensor]]
    logits: torch.Tensor
    pieces: torch.Tensor | None = None


def config_for(recipe: DrafterRecipe, target: Gemma4TextConfig) -> Gemma4AssistantConfig:
    """Four layers S,S,S,F with the target's head dimensions, since they attend to the target's K/V rows."""
    full = target.per_layer_config[target.num_hidden_layers - 1]
    sliding = target.per_layer_config[target.layer_types.index("sliding_attention")]
    text = Gemma4TextConfig(
        vocab_size=target.vocab_size,
        vocab_size_per_layer_input=0,
        hidden_size_per_layer_input=0,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=sliding.num_key_value_heads,
        head_dim=sliding.head_dim,
        global_head_dim=full.head_dim,
        num_kv_shared_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        rope_parameters=target.rope_parameters,
        sliding_window=target.sliding_window,
        max_position_embeddings=target.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=target.hidden_size,
        use_ordered_embeddings=True,
        num_centroids=recipe.num_centroids,
        centroid_intermediate_top_k=recipe.top_centroids,
        tie_word_embeddings=True,
    )


def balanced_clusters(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Token ids [V] ordered so that each run of V/count ids is one cluster: equal halves along the first principal axis, recursively."""
    groups = [torch.arange(len(rows))]
    while len(groups) < count:
        halves = []
        for group in groups:
            centred = rows[group] - rows[group].mean(0)
            axis = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -1]
            order = group[torch.argsort(centred @ axis)]
            halves += [order[: len(order) // 2], order[len(order) // 2 :]]
        groups = halves
    return torch.cat(groups)


def initialise(drafter: Gemma4AssistantForCausalLM, embedding: torch.Tensor, seed: int) -> None:
    """Starts the drafter inside the target's embedding space: its head and both projections are the main axes of the embedding."""
    torch.manual_seed(seed)
    for name, weight in drafter.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            nn.init.constant_(weight, weight.numel() ** -0.25)
        elif weight.dim() < 2:
            nn.init.ones_(weight)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(weight)
        else:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    width = drafter.hidden_size
    axes = torch.linalg.eigh(embedding.T @ embedding).eigenvectors[:, -width:]
    with torch.no_grad():
        drafter.lm_head.weight.copy_(embedding @ axes)
        drafter.pre_projection.weight[:, embedding.shape[1] :].copy_(axes.T)
        drafter.post_projection.weight.copy_(axes)
        normed = nn.functional.normalize(drafter.lm_head.weight.float(), dim=1)
        order = balanced_clusters(normed, drafter.config.num_centroids)
        drafter.masked_embedding.token_ordering.copy_(order)
        clusters = drafter.lm_head.weight[order].view(drafter.config.num_centroids, -1, width)
        drafter.masked_embedding.centroids.weight.copy_(clusters.mean(1))


@torch.no_grad()
def target_rows(target: Gemma4ForCausalLM, tokens: torch.Tensor, pieces: torch.Tensor | None = None) -> TargetRows:
    """Runs the target once over tokens [B, T]; with `pieces` [V] its head has these tokens alone."""
    output = target.model(input_ids=tokens, use_cache=False, return_shared_kv_states=True)
    logits = _logits(target, output.last_hidden_state, pieces)
    cap = target.config.final_logit_softcapping
    shared = {kind: (k, v) for kind, (k, v) in output.shared_kv_states.items()}
    return TargetRows(output.last_hidden_state, shared, cap * torch.tanh(logits / cap), pieces)


def _logits(model: Gemma4ForCausalLM | Gemma4AssistantForCausalLM, rows: torch.Tensor, pieces: torch.Tensor | None) -> torch.Tensor:
    return (model.lm_head(rows) if pieces is None else rows @ model.lm_head.weight[pieces].T).float()


def masks_for(length: int, window: int) -> dict[str, torch.Tensor]:
    """Additive masks [1, 1, T, T]: position n sees the rows before n only, at most window - 1 of them on sliding layers."""
    back = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    full = torch.where(back > 0, 0.0, MASKED)
    sliding = torch.where((back > 0) & (back < window), 0.0, MASKED)
    return {"full_attention": full[None, None], "sliding_attention": sliding[None, None]}


def draft_states(
    drafter: Gemma4AssistantForCausalLM, target: Gemma4ForCausalLM, tokens: torch.Tensor, rows: TargetRows, steps: int
) -> Iterator[torch.Tensor]:
    """Yields the drafter's normed state [B, T, hidden] of each step; entry n of step j (from 1) predicts token n + j."""
    length = tokens.shape[1]
    masks = masks_for(length, target.config.sliding_window)
    positions = torch.arange(length)[None]
    # All places: by a number transformers 5.24 cuts rows before layers that share K/V, also per-layer inputs where there are none.
    kept = torch.arange(length)
    # Row n-1 for position n; position 0 has no row before it and is never scored.
    hidden = nn.functional.pad(rows.hidden, (0, 0, 1, 0))[:, :-1]
    embedded = target.model.embed_tokens(tokens)
    for step in range(steps):
        shifted = nn.functional.pad(embedded, (0, 0, 0, step))[:, step:]
        state = drafter.model(
            inputs_embeds=drafter.pre_projection(torch.cat([shifted, hidden], dim=-1)),
            attention_mask=masks,
            position_ids=positions,
            shared_kv_states=dict(rows.shared),
            use_cache=False,
            logits_to_keep=kept,
        ).last_hidden_state
        hidden = drafter.post_projection(state)
        yield state


def clusters_of(drafter: Gemma4AssistantForCausalLM) -> torch.Tensor:
    """The centroid [V] of each token."""
    order = drafter.masked_embedding.token_ordering
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)) // (len(order) // drafter.config.num_centroids))


def answer_loss(
    drafter: Gemma4AssistantForCausalLM, states: Iterable[torch.Tensor], ids: torch.Tensor, written: torch.Tensor
) -> torch.Tensor:
    """Cross-entropy to those of the tokens `ids` [B, T] that the target writes, bool [B, T], summed over steps; plus the centroids' own."""
    cluster_of, total = clusters_of(drafter), torch.zeros(())
    for ahead, state in enumerate(states, start=1):
        # Entry n predicts token n + ahead.
        label, row = ids[:, ahead:][written[:, ahead:]], state[:, :-ahead][written[:, ahead:]]
        own = nn.functional.cross_entropy(drafter.lm_head(row).float(), label)
        centroid = nn.functional.cross_entropy(drafter.masked_embedding.centroids(row).float(), cluster_of[label])
        total = total + (own + DrafterRecipe.centroid_weight * centroid) * 0.9 ** (ahead - 1)
    return total


def distillation_loss(
    drafter: Gemma4AssistantForCausalLM, target: Gemma4ForCausalLM, tokens: torch.Tensor, rows: TargetRows, recipe: DrafterRecipe
) -> torch.Tensor:
    """Half KL to the target's distribution, half cross-entropy to its choice, summed over steps; plus the centroids' own loss."""
    cluster_of = clusters_of(drafter)
    teacher = torch.log_softmax(rows.logits, dim=-1)
    choice = rows.logits.argmax(-1)
    total = torch.zeros(())
    for step, state in enumerate(draft_states(drafter, target, tokens, rows, recipe.draft_steps), start=1):
        # Token n+step was chosen by the target's row n+step-1.
        state, expected, label = state[:, 1 : -step + 1 or None], teacher[:, step:], choice[:, step:]
        student = torch.log_softmax(_logits(drafter, state, rows.pieces), dim=-1)
        divergence = nn.functional.kl_div(student, expected, log_target=True, reduction="none").sum(-1).mean()
        agreement = nn.functional.nll_loss(student.flatten(0, 1), label.flatten())
        clusters = drafter.masked_embedding.centroids(state).float().flatten(0, 1)
        token = label if rows.pieces is None else rows.pieces[label]
        centroid = nn.functional.cross_entropy(clusters, cluster_of[token].flatten())
        total = total + (0.5 * divergence + 0.5 * agreement + recipe.centroid_weight * centroid) * 0.9 ** (step - 1)
    return total


def train_drafter(
    target: Gemma4ForCausalLM,
    texts: np.ndarray,
    recipe: DrafterRecipe,
    report: Callable[[dict[str, float]], None],
    checkpoint: Callable[[Gemma4AssistantForCausalLM], None],
    pieces: torch.Tensor | None = None,
) -> tuple[Gemma4AssistantForCausalLM, dict[str, object]]:
    """Trains for `recipe.minutes` on texts [N, T], mostly written by the target itself; with `pieces` [V] to choose among these tokens."""
    torch.manual_seed(recipe.seed)
    drafter = Gemma4AssistantForCausalLM._from_config(config_for(recipe, target.config), attn_implementation="eager")
    initialise(drafter, target.model.embed_tokens.weight.float(), recipe.seed)
    target.requires_grad_(False)
    optimizers = optimizers_for(drafter, recipe.muon_rate, recipe.adam_rate, recipe.weight_decay)
    read_rows, step_loss = torch.compile(target_rows, dynamic=False), torch.compile(distillation_loss, dynamic=False)
    generator = np.random.default_rng(recipe.seed)

    def loss_of(_: float) -> torch.Tensor:
        chosen = texts[generator.integers(len(texts), size=recipe.batch_size)]
        tokens = torch.from_numpy(chosen.astype(np.int64))
        return step_loss(drafter, target, tokens, read_rows(target, tokens, pieces), recipe)

    rates = {"warm_up": recipe.warm_up, "cool_down": recipe.cool_down}
    steps = train_for(recipe.minutes, drafter, optimizers, loss_of, **rates, report=report, keep=lambda _: checkpoint(drafter))
    return drafter, {"steps": steps, "recipe": asdict(recipe)}
