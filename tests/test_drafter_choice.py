"""An exported bundle opened with every kind of drafter: same output, the right one chosen, what is not there refused."""

from __future__ import annotations

import dataclasses
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.bundle.bundle import Bundle, open_bundle
from edge_runtime.bundle.manifest import BundleFile
from edge_runtime.drafting.policies import DRAFTER_KINDS
from edge_runtime.errors import BackendError, BundleError
from edge_runtime.session.open import open_session
from edge_runtime.session.self_checks import check_lossless

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

from edge_runtime.backends.llama.drafter import LlamaDrafter
from edge_runtime.backends.llama.pair import drafter_opened

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


def test_the_split_drafter_is_taken_where_there_is_one(folder: Path) -> None:
    with open_session(folder) as session:
        assert session.drafter_kind == "split"
        assert session.target.length == 0, "nothing is computed before the prompt"


def test_without_the_row_kernels_llama_cpp_drafts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_runtime.backends.llama.drafter.is_switched_on", lambda: False)
    assert drafter_opened(open_bundle(folder), None) == "dense"
    with open_session(folder, threads=1) as session:
        assert (session.drafter_kind, type(session.drafter)) == ("dense", LlamaDrafter)
        assert session.generate(PROMPT, max_tokens=8).text()
    with pytest.raises(BackendError, match=r"do not compute this split drafter \(they do not run here\), .*; choose dense"):
        open_session(folder, threads=1, drafter="split")


def without(bundle: Bundle, *roles: str) -> Bundle:
    files = tuple(file for file in bundle.manifest.files if file.role not in roles)
    return Bundle(bundle.folder, dataclasses.replace(bundle.manifest, files=files))


def opening(monkeypatch: pytest.MonkeyPatch, folder: Path, *missing: str) -> None:
    bundle = without(open_bundle(folder), *missing)
    monkeypatch.setattr("edge_runtime.session.open.open_bundle", lambda *_, **__: bundle)


def test_without_the_head_there_is_no_split_drafter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opening(monkeypatch, folder, "drafter_head")
    with open_session(folder, threads=1) as session:
        assert session.drafter_kind == "dense"
    with pytest.raises(BundleError, match=r"has no split drafter: .*choose dense"):
        open_session(folder, threads=1, drafter="split")


def test_a_bundle_from_before_with_a_drafter_in_parts_opens(folder: Path, tmp_path: Path) -> None:
    old = shutil.copytree(folder, tmp_path / "old")
    (old / "body.gguf").write_bytes(body := (folder / "tokenizer.json").read_bytes())
    manifest = open_bundle(folder).manifest
    part = BundleFile(path="body.gguf", role="drafter_body", format="gguf", bytes=len(body), sha256=sha256(body).hexdigest())
    (old / "manifest.json").write_text(dataclasses.replace(manifest, files=(*manifest.files, part)).to_json())
    with open_session(old, threads=1) as session:
        assert session.drafter_kind == "split"
        assert session.generate(PROMPT, max_tokens=8).text()


@pytest.mark.parametrize("kind", ["lookup", "none"])
def test_a_bundle_without_a_drafter_runs_without_one(folder: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opening(monkeypatch, folder, "drafter", "drafter_head")
    with open_session(folder, threads=1, drafter=kind) as session:
        assert len(session.generate(PROMPT, max_tokens=8).text()) > 0
    with pytest.raises(BundleError, match="has no gguf drafter"):
        open_session(folder, threads=1)
