"""Images and sound on onnxruntime: encoder rows beside transformers', prompts with media, prefixes, drafts."""

from __future__ import annotations

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
from tiny_media import MEDIA_IDS, export_media_pair, noise, picture, reference_rows, write_media_member

# Of the rows' norm. The checkpoint is bfloat16, so float16 holds nearly all of its weights exactly.
ROWS = {"f32": 1e-5, "f16": 1e-5, "int8": 0.1}
TEXT = [2, 40, 41, 42, 300, 310, 320]
MEDIA = [picture(96, 144, 1), picture(48, 48, 2), picture(336, 432, 3), noise(16_000), noise(7_777), noise(161), noise(480_000)]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_media_member(tmp_path_factory.mktemp("media") / "target")


@pytest.fixture(scope="module")
def model(target) -> Any:
    return transformers.Gemma4ForConditionalGeneration.from_pretrained(target, dtype=torch.float32).eval()


def export(target: Path, folder: Path, media: EncoderType | None, **onnx: Any) -> Path:
    return export_media_pair(folder, target=target, media=media, onnx=OnnxRequest(target="f32", drafter="f32", **onnx))


@pytest.fixture(scope="module", params=["dynamic", "static"])
def session(request, target, tmp_path_factory) -> Session:
    bundle = export(target, tmp_path_factory.mktemp(request.param), "f32", device="static" if request.param == "static" else None)
    with open_session(bundle, threads=1) as session:
        yield session


def rows_of(session: Session, media: Image | Sound) -> np.ndarray:
    return session._parts.encoder.rows(media)


def distance(ours: np.ndarray, expected: np.ndarray) -> float:
    assert ours.shape == expected.shape
    return float(np.linalg.norm(ours - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("weights", ["f32", "f16"])
def test_rows_equal_transformers(weights, target, model, tmp_path):
    with open_session(export(target, tmp_path, weights), threads=1) as session:
        distances = [distance(rows_of(session, media), reference_rows(model, media)) for media in MEDIA]
    assert max(distances) < ROWS[weights], distances


def test_text_is_the_same_as_without_encoders(session, target, tmp_path):
    with open_session(export(target, tmp_path, None), threads=1) as plain:
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


def test_int8_rows_are_near(target, model, tmp_path):
    """Only that the graphs run, and the rows' direction: the weights are random."""
    with open_session(export(target, tmp_path, "q8_0"), threads=1) as session:
        for media in MEDIA[:4]:
            assert distance(rows_of(session, media), reference_rows(model, media)) < ROWS["int8"]


def test_an_image_beyond_the_table_is_refused(session):
    with pytest.raises(BackendError, match="out of data bounds"):
        rows_of(session, picture(48, 2064, 1))
