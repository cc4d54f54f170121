"""Predictions of the profiles beside speeds that others published for Gemma 4 on these devices. Without drafts; CPU backends."""

from __future__ import annotations

import pytest

from edge_runtime.planning.memory import MemoryPlan
from edge_runtime.planning.speed import PairFacts, speed_plan
from edge_runtime.planning.speed_profile import speed_profile

POTATO, LITERT = "github.com/potato-os/core/pull/269", "ai.google.dev/edge/litert-lm/overview"
LAPTOP = "pt13762104.github.io, 6 June 2026"
NO_MEMORY = MemoryPlan(process=0, weights=0, repacked=0, cache=0, buffers=0)


def facts(*, read: float, head: float, bits: float, layers: int, prompt: float | None = None) -> PairFacts:
    """Sizes of a published model: weights that each token reads, of them the head's and those of a prompt's, and bits per weight."""
    return PairFacts(
        target_bytes=read * bits / 8,
        step_bytes=60e6,
        parameters=read,
        head_parameters=head,
        prompt_parameters=read - head if prompt is None else prompt,
        drafter_parameters=78e6,
        layers=layers,
        drafter_layers=4,
        kv_bytes=40e6,
    )


# Weights without the per-layer embedding tables, which are looked up. Q4_K_M: 3.11 GB of 4.6 G weights.
E2B_Q4_K_M = facts(read=2.25e9, head=0.40e9, bits=5.4, layers=35)
E2B_Q4_0 = facts(read=2.25e9, head=0.40e9, bits=4.5, layers=35)
# Of the runtimes LiteRT-LM alone computes no more of a prompt than K and V need.
E2B_K_AND_V = facts(read=2.25e9, head=0.40e9, bits=4.5, layers=35, prompt=0.53e9)
E4B_Q4_0 = facts(read=4.6e9, head=0.67e9, bits=4.5, layers=42)
PUBLISHED = [
    # profile, pair, runtime, source, decode tok/s, prefill tok/s (None: not published)
    ("raspberry-pi-5", "E2B Q4_K_M", E2B_Q4_K_M, "llama.cpp", POTATO, 6.44, 31.98),
    ("raspberry-pi-5", "E2B Q4_K_M", E2B_Q4_K_M, "ik_llama", POTATO, 7.30, 46.72),
    ("raspberry-pi-5", "E2B 4 bits", E2B_K_AND_V, "LiteRT-LM", LITERT, 8.0, 133.0),
    ("raspberry-pi-5", "E4B Q4_0", E4B_Q4_0, "llama.cpp", POTATO, 2.79, 18.86),
    ("raspberry-pi-5", "E4B Q4_0", E4B_Q4_0, "ik_llama", POTATO, 3.07, 19.18),
    ("raspberry-pi-4", "E2B Q4_K_M", E2B_Q4_K_M, "llama.cpp", POTATO, 1.75, 4.36),
    ("raspberry-pi-4", "E4B Q4_0", E4B_Q4_0, "llama.cpp", POTATO, 0.98, 2.18),
    ("x86-laptop", "E2B Q4_0", E2B_Q4_0, "llama.cpp, i7-10750H", LAPTOP, 20.48, 84.24),
    ("x86-laptop", "E2B 4 bits", E2B_K_AND_V, "LiteRT-LM, i7-10750H", LAPTOP, 20.45, 211.37),
    ("apple-m", "E2B 4 bits", E2B_K_AND_V, "LiteRT-LM, M4", LITERT, 42.0, 901.0),
]


@pytest.mark.parametrize(("profile", "pair", "sizes", "runtime", "source", "decode", "prefill"), PUBLISHED)
def test_published_speeds_are_in_the_predicted_ranges(profile, pair, sizes, runtime, source, decode, prefill):
    plan = speed_plan(sizes, speed_profile(profile, None), NO_MEMORY, 8, None)
    print(
        f"| {profile} | {pair} | {runtime} | {decode:g} | {plan.plain.middle:.2g} [{plan.plain.low:.2g}, {plan.plain.high:.2g}] |"
        f" {prefill:g} | {plan.prefill.middle:.2g} [{plan.prefill.low:.2g}, {plan.prefill.high:.2g}] | {source} |"
    )
    assert plan.plain.low <= decode <= plan.plain.high
    assert plan.prefill.low <= prefill <= plan.prefill.high
