"""What an export measured is put in words; a manifest's figures may be anything."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.bundle.bundle import DEGRADED_KL, Quality, degradation, exported_quality, first_time
from edge_runtime.bundle.manifest import with_hash
from edge_runtime.session.open import open_session

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


def test_a_bundle_is_mentioned_once_on_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_MTP_CACHE", str(tmp_path / "cache"))
    assert [first_time(["llama", "a"]), first_time(["llama", "a"]), first_time(["onnx", "a"])] == [True, False, True]
    monkeypatch.setenv("EDGE_MTP_CACHE", "/dev/null")
    assert [first_time(["llama", "a"]), first_time(["llama", "a"])] == [True, True], "a cache that cannot be written"


def test_opening_mentions_it_the_first_time(exported_pair: Path, probe_memory: None, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(exported_pair, tmp_path / "bundle", copy_function=shutil.copy))
    manifest = copy / "manifest.json"
    manifest.write_text(with_hash(json.loads(manifest.read_text()) | {"parity": {"quality": FIGURES}}))
    for times in (1, 0):
        notes: list[str] = []
        with open_session(copy, threads=1, notify=notes.append):
            assert sum("bundle answers worse than its model: it keeps 43%" in note for note in notes) == times
