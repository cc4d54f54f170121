"""Images and sound on every backend: drafts change nothing, no picture is taken for another, encoders come and go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("onnx", reason="needs edge-mtp[export]")


from edge_export.onnx.request import OnnxRequest
from edge_runtime.errors import RequestError
from edge_runtime.media.encoder_inputs import Image
from edge_runtime.session import prompt_cache
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session
from tiny_media import MEDIA_IDS, kept_media_pair, noise, picture

TEXT = [2, 40, 41, 42, 300, 310, 320]


@pytest.fixture(scope="module", params=["llama", "onnx", "onnx-static"])
def session(request: pytest.FixtureRequest, probe_memory: None) -> Iterator[Session]:
    if request.param == "llama":
        pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
        root = kept_media_pair()
    else:
        pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
        device = "static" if request.param == "onnx-static" else None
        root = kept_media_pair(dtype="bfloat16", onnx=OnnxRequest(target="f32", drafter="f32", device=device))
    with open_session(root / "bundle", drafter="dense" if request.param == "llama" else None, threads=1) as session:
        yield session


@pytest.mark.parametrize("first", [TEXT[:3], TEXT[:3] * 12], ids=["in one window", "behind a window"])
def test_drafts_change_nothing(first: list[int], session: Session) -> None:
    media = [picture(144, 192, 4), noise(9_000)]
    ids = [*first, MEDIA_IDS["<|image|>"], 40, MEDIA_IDS["<|audio|>"], *TEXT[3:]]
    plain, drafted = (session.generate(session.media_prompt(ids, media), max_tokens=40, draft_length=length) for length in (0, 3))
    assert plain.text() == drafted.text()
    assert drafted.tokens == plain.tokens
    assert drafted.stats.drafted > 0


def test_no_picture_is_taken_for_another(session: Session) -> None:
    first, second = picture(96, 144, 5), picture(96, 144, 6)

    def run(image: Image, **options: Any) -> Any:
        prompt = session.media_prompt([*TEXT[:3], MEDIA_IDS["<|image|>"], *TEXT[3:]], [image])
        generation = session.generate(prompt, max_tokens=8, draft_length=0, **options)
        list(generation)
        return generation

    fresh = {id(image): run(image).tokens for image in (first, second)}
    run(first)
    same, changed = run(first, reuse_prefix=True), run(second, reuse_prefix=True)
    assert same.stats.reused_tokens == len(same.prompt) - 1
    assert changed.stats.reused_tokens == 4  # three tokens and the begin of an image
    assert (same.tokens, changed.tokens) == (fresh[id(first)], fresh[id(second)])


@pytest.mark.parametrize(
    ("ids", "shape", "says"),
    [([], (0, 0), "at least one id"), ([-1, 0], (2, 0), "all negative"), ([-1, -2], (1, 0), "the shape"), ([-1, -2], (2, 1), "the shape")],
)
def test_soft_rows_that_cannot_be_are_refused(session: Session, ids: list[int], shape: tuple[int, int], says: str) -> None:
    """`shape`: how many rows, and how many values more than a hidden row has."""
    session.target.rollback(0)
    rows = np.zeros((shape[0], session.target.hidden_size + shape[1]), np.float32)
    with pytest.raises(RequestError, match=says):
        session.target.prefill_rows(ids, rows)
    assert session.target.length == 0


def test_prompts_with_pictures_come_back_from_the_disk(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_cache, "SPEEDUP", 0.0)
    cache = prompt_cache.PromptCache(tmp_path / "prompts", {}, limit=1 << 26)
    cached, begin, end = Session(replace(session._parts, prompt_cache=cache)), TEXT[:3] * 15, TEXT[3:] * 10

    def run(image: Image) -> Any:
        session.target.rollback(0)
        prompt = session.media_prompt([*begin, MEDIA_IDS["<|image|>"], *end], [image])
        generation = cached.generate(prompt, max_tokens=8, draft_length=0, reuse_prefix=True)
        list(generation)
        cache.close()
        return generation

    first, again, other = run(picture(96, 144, 5)), run(picture(96, 144, 5)), run(picture(96, 144, 6))
    assert again.tokens == first.tokens
    assert [each.stats.reused_tokens for each in (first, again, other)] == [0, len(first.prompt) - 1, len(begin) + 1]
    assert [each.stats.media_rows > 0 for each in (first, again, other)] == [True, False, True]
    plain = session.generate(
        session.media_prompt([*begin, MEDIA_IDS["<|image|>"], *end], [picture(96, 144, 6)]), max_tokens=8, draft_length=0
    )
    list(plain)
    assert other.tokens == plain.tokens
