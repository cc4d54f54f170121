"""The statistics of draws: tokens of the distribution pass, those of another one do not."""

from __future__ import annotations

import numpy as np
import pytest

from check_draws import Draws


def p_values(bias: float) -> dict[str, float]:
    """Of tokens drawn from distributions of 12 tokens whose logits are that much sharper than they should be."""
    random, sums = np.random.default_rng(1), Draws()
    for _ in range(4000):
        logits = random.normal(0, 2, 12)
        right, drawn = (np.exp(factor * logits) / np.exp(factor * logits).sum() for factor in (1, 1 + bias))
        sums.add(right, float(right[random.choice(12, p=drawn)]), float(random.random()))
    assert sums.tokens == 4000
    return sums.p_values()


def test_right_draws_pass() -> None:
    assert min(p_values(0).values()) > 1e-3


@pytest.mark.parametrize("bias", [0.15, -0.15])
def test_sharper_and_flatter_draws_do_not(bias: float) -> None:
    assert p_values(bias)["log_probability"] < 1e-6


def test_tokens_as_likely_as_each_other_share_a_place() -> None:
    sums, random = Draws(), np.random.default_rng(1)
    for _ in range(4000):
        sums.add(np.full(3, 1 / 3), 1 / 3, float(random.random()))
    assert sums.p_values()["places"] > 1e-3
