"""Images and sound on onnxruntime: encoder rows beside transformers', prompts with media, prefixes, drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
pytest.importorskip("onnx", reason="needs edge-mtp[export]")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


from edge_export.gguf.media_encoder import EncoderType
from edge_export.onnx.request import OnnxRequest
from edge_runtime.backends.onnx.target import OrtTarget
from edge_runtime.errors import BackendError
from edge_runtime.media.encoder_inputs import Image, Sound
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session
from tiny_media import MEDIA_IDS, kept_media_pair, noise, picture, reference_rows

TEXT = [2, 40, 41, 42, 300, 310, 320]
MEDIA = [picture(96, 144, 1), picture(48, 48, 2), picture(336, 432, 3), noise(16_000), noise(7_777), noise(161), noise(480_000)]


def exported(media: EncoderType | None, **onnx: Any) -> Path:
    """The bundle of a tiny E2B in bfloat16."""
    return kept_media_pair(dtype="bfloat16", media=media, onnx=OnnxRequest(target="f32", drafter="f32", **onnx)) / "bundle"


@pytest.fixture(scope="module")
def model() -> Any:
    folder = exported("f32").parent / "target"
    return transformers.Gemma4ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=["dynamic", "static"])
def session(request) -> Iterator[Session]:
    with open_session(exported("f32", device="static" if request.param == "static" else None), threads=1) as session:
        yield session


def rows_of(session: Session, media: Image | Sound) -> np.ndarray:
    return session._parts.encoder.rows(media)


def largest_distance(session: Session, model: Any, media: Sequence[Image | Sound]) -> float:
    """Of rows to transformers' rows, as a share of their norm."""
    distances = []
    for item in media:
        ours, expected = rows_of(session, item), reference_rows(model, item)
        assert ours.shape == expected.shape
        distances.append(np.linalg.norm(ours - expected) / np.linalg.norm(expected))
    return float(max(distances))


def test_rows_equal_transformers(session, model):
    assert largest_distance(session, model, MEDIA) < 1e-5


@pytest.mark.parametrize(("weights", "limit"), [("f16", 1e-5), ("q8_0", 0.1)])
def test_rows_of_smaller_weights_are_near(weights, limit, model):
    """Float16 holds nearly all of the weights exactly. Of int8, whose weights are random, only that it runs, and the rows' direction."""
    with open_session(exported(weights), threads=1) as session:
        assert largest_distance(session, model, MEDIA[:4]) < limit


def test_text_is_the_same_as_without_encoders(session):
    with open_session(exported(None), threads=1) as plain:
        assert session.generate(TEXT, max_tokens=24, draft_length=3).text() == plain.generate(TEXT, max_tokens=24, draft_length=3).text()


def test_logits_behind_an_image_equal_transformers(session, model):
    image = picture(96, 144, 1)
    prompt = session.media_prompt([*TEXT[:3], MEDIA_IDS["<|image|>"], *TEXT[3:]], [image])
    list(session.generate(prompt, max_tokens=1, draft_length=0))
    session.target.rollback(len(prompt.ids) - 1)
    ours = session.target.verify(prompt.ids[-1:])[0]
    ids = torch.tensor([[token if token >= 0 else MEDIA_IDS["<|image|>"] for token in prompt.ids]])
    with torch.no_grad():
        expected = model(
            input_ids=ids,
            pixel_values=torch.from_numpy(image.patches())[None],
            image_position_ids=torch.from_numpy(image.positions())[None],
            mm_token_type_ids=(ids == MEDIA_IDS["<|image|>"]).long(),
        ).logits[0, -1]
    assert np.abs(ours - expected.numpy()).max() < 1e-3


def test_soft_rows_are_not_computed_behind_the_last_keys(session):
    """What follows an image, in one piece or two, has the bits of what follows one all of whose rows were computed."""
    target = session.target
    if not isinstance(target, OrtTarget):
        pytest.skip("graphs of fixed shapes have one for prompts, which has no such rows")
    assert target.skips_unread_rows
    rows = np.random.default_rng(0).standard_normal((300, target.hidden_size)).astype(np.float32)
    ids, result = list(range(-300, 0)), []
    for whole in (False, True):
        target.rollback(0)
        target.prefill(TEXT, rows_read=0)
        for piece in (slice(0, 44), slice(44, 300)):
            if whole:
                target._forward(np.array(ids[piece]), rows[piece], len(ids[piece]))
            else:
                target.prefill_rows(ids[piece], rows[piece])
        result.append(target.verify(TEXT).copy())
    target.rollback(0)
    assert np.array_equal(*result)


def test_an_image_beyond_the_table_is_refused(session):
    with pytest.raises(BackendError, match="out of data bounds"):
        rows_of(session, picture(48, 2064, 1))
