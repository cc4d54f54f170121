"""An exported bundle opened with every kind of drafter: same output, the right one chosen, what is not there refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.bundle.bundle import Bundle, open_bundle
from edge_runtime.drafting.drafter_kinds import DRAFTER_KINDS
from edge_runtime.errors import BundleError
from edge_runtime.planning.speed import SPARSE_SHARE
from edge_runtime.session.open import open_session
from edge_runtime.session.trials.lossless import check_lossless

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

from edge_runtime.backends.llama.pair import SPLIT_SAVES, drafter_opened

PROMPT = "import os\nimport sys\n\ndef read(path):\n    with open(path) as file:\n        return file.read()\n\ndef read"
# A near-tie: two float16 paths that sum in another order may differ by this much.
NEAR_TIE = 0.05


@pytest.fixture
def folder(exported_pair: Path, probe_memory: None) -> Path:
    return exported_pair


@pytest.mark.parametrize("kind", DRAFTER_KINDS)
def test_every_kind_gives_the_plain_output(folder: Path, kind: Any) -> None:
    with open_session(folder, threads=1, drafter=kind) as session:
        assert session.drafter_kind == kind
        generation = session.generate(PROMPT, max_tokens=60, draft_length=4)
        generation.text()
        assert (generation.stats.accepted > 0) == (kind != "none")
        report = check_lossless(session, generation)
        assert report.equal or abs(report.logit_gap or 1.0) < NEAR_TIE, report.sentence()


@pytest.mark.parametrize(("dense", "kind"), [(SPLIT_SAVES - 1, "dense"), (SPLIT_SAVES, "split")])
def test_split_is_taken_where_it_reads_far_less(folder: Path, dense: float, kind: str) -> None:
    """Of the head a step reads a share."""
    bundle = open_bundle(folder)
    body, head = bundle.file("drafter_body", "gguf").bytes, bundle.file("drafter_head").bytes
    size = math.ceil(dense + body + SPARSE_SHARE * head) if kind == "split" else math.floor(dense + body)
    files = tuple(dataclasses.replace(file, bytes=size) if file.role == "drafter" else file for file in bundle.manifest.files)
    sized = Bundle(bundle.folder, dataclasses.replace(bundle.manifest, files=files))
    assert drafter_opened(sized, None) == kind
    assert drafter_opened(sized, "lookup") == "lookup"


def test_a_small_pair_takes_dense_and_computes_nothing_before_the_prompt(folder: Path) -> None:
    with open_session(folder) as session:
        assert session.drafter_kind == "dense"
        assert session.target.length == 0
        assert session.generate(PROMPT, max_tokens=8).text()


def without(bundle: Bundle, *roles: str) -> Bundle:
    files = tuple(file for file in bundle.manifest.files if file.role not in roles)
    return Bundle(bundle.folder, dataclasses.replace(bundle.manifest, files=files))


def opening(monkeypatch: pytest.MonkeyPatch, folder: Path, *missing: str) -> None:
    bundle = without(open_bundle(folder), *missing)
    monkeypatch.setattr("edge_runtime.session.open.open_bundle", lambda *_, **__: bundle)


@pytest.mark.parametrize("missing", ["drafter_body", "drafter_head"])
def test_half_a_split_drafter_is_none(folder: Path, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opening(monkeypatch, folder, missing)
    with open_session(folder, threads=1) as session:
        assert session.drafter_kind == "dense"
    with pytest.raises(BundleError, match=r"has no split drafter: .*choose dense"):
        open_session(folder, threads=1, drafter="split")


@pytest.mark.parametrize("kind", ["lookup", "none"])
def test_a_bundle_without_a_drafter_runs_without_one(folder: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opening(monkeypatch, folder, "drafter", "drafter_body", "drafter_head")
    with open_session(folder, threads=1, drafter=kind) as session:
        assert len(session.generate(PROMPT, max_tokens=8).text()) > 0
    with pytest.raises(BundleError, match="has no gguf drafter"):
        open_session(folder, threads=1)
