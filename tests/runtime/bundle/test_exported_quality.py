"""What an export measured is put in words; a manifest's figures may be anything."""

from __future__ import annotations

from typing import Any

import pytest

from edge_runtime.bundle.exported_quality import DEGRADED_KL, Quality, degradation, exported_quality

FIGURES: dict[str, Any] = {"rows": 528, "mean_kl": 1.04, "perplexity": 268.4, "reference_perplexity": 87.0, "greedy_agreement": 0.43}


def test_figures_are_put_in_words() -> None:
    quality = exported_quality({"quality": FIGURES | {"texts": {}}})
    assert quality == Quality(**FIGURES)
    assert quality.words == "keeps 43% of the model's first choices, perplexity 268 instead of 87 (mean KL 1.04)"


def test_only_what_has_lost_much_is_mentioned() -> None:
    assert degradation({"quality": FIGURES}, "my-bundle") == (
        "my-bundle answers worse than its model: it keeps 43% of the model's first choices, perplexity 268 instead of 87 (mean KL 1.04);"
        " export it in a type of more bits, or calibrated."
    )
    assert degradation({"quality": FIGURES | {"mean_kl": DEGRADED_KL}}, "my-bundle") is None


@pytest.mark.parametrize("value", [None, "1", True, -1, float("nan"), float("inf"), 10**400, [1.0]])
@pytest.mark.parametrize("name", FIGURES)
def test_figures_that_are_none_are_not_read(name: str, value: object) -> None:
    assert exported_quality({"quality": FIGURES | {name: value}}) is None


@pytest.mark.parametrize("parity", [None, 5, "x", [], {}, {"quality": None}, {"quality": []}, {"skipped": "no"}])
def test_parity_without_quality(parity: object) -> None:
    assert exported_quality(parity) is None
    assert degradation(parity, "bundle") is None
