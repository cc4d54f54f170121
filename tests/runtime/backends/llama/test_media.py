"""Images and sound on llama.cpp, on a tiny random member: rows and logits against transformers, and what knows which picture it has."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
pytest.importorskip("gguf", reason="needs edge-mtp[export]")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from edge_runtime.bundle.gguf_gemma4 import check_encoder
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.media.encoder_inputs import Image, Sound
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session
from tiny_media import MEDIA_IDS, kept_media_pair, noise, picture, reference_rows

# Of the rows' norm, by what ggml rounds to float16: the input of convolutions, K and V of images, its table of GELU. Without clip.use_gelu
# the distance is larger.
ROWS = {Image: 3e-3, Sound: 2e-3}
TEXT = [2, 40, 41, 42, 300, 310, 320]


IMAGES = [picture(96, 144, 1), picture(48, 48, 2), picture(336, 432, 3), picture(768, 768, 4)]
# libmtmd's own frames of quiet sounds make rows that differ by a tenth of their norm.
QUIET = [Sound(noise(15_000).samples * scale) for scale in (np.float32(0.1), np.float32(0.001))]
MEDIA = [*IMAGES, noise(16_000), noise(7_777), noise(161), noise(480_000), *QUIET]


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    root = kept_media_pair()
    return {"bundle": root / "bundle", "target": root / "target"}


@pytest.fixture(scope="module")
def model(folders) -> Any:
    return transformers.Gemma4ForConditionalGeneration.from_pretrained(folders["target"], dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def session(folders, probe_memory) -> Session:
    with open_session(folders["bundle"], drafter="dense", threads=1) as session:
        yield session


def rows_of(session: Session, media: Image | Sound) -> np.ndarray:
    return session._parts.encoder.rows(media)


def placed(media: Image | Sound, *, before: list[int], after: list[int]) -> list[int]:
    return [*before, MEDIA_IDS["<|image|>" if isinstance(media, Image) else "<|audio|>"], *after]


@pytest.mark.parametrize("media", MEDIA, ids=lambda media: f"{type(media).__name__} of {media.rows} rows")
def test_rows_equal_transformers(media, session, model):
    ours, expected = rows_of(session, media), reference_rows(model, media)
    assert ours.shape == expected.shape == (media.rows, 64)
    assert np.linalg.norm(ours - expected) / np.linalg.norm(expected) < ROWS[type(media)]


def test_a_build_that_takes_sound_otherwise_is_refused(session, monkeypatch):
    from edge_runtime.backends.llama import media_encoder

    with monkeypatch.context() as patch:
        patch.setattr(media_encoder, "_SOUND_INPUT", b"another name")
        with pytest.raises(BackendError, match="takes sound in another form"):
            rows_of(session, noise(5_000))
    assert rows_of(session, picture(96, 144, 1)).shape == (6, 64)
    assert rows_of(session, noise(5_000)).shape == (noise(5_000).rows, 64)


def test_logits_behind_an_image_equal_transformers(session, model):
    """The same rows go into both text models, so that only the text model's own differences remain."""
    image = picture(96, 144, 1)
    prompt = session.media_prompt(placed(image, before=TEXT[:3], after=TEXT[3:]), [image])
    generation = session.generate(prompt, max_tokens=1, draft_length=0)
    list(generation)
    rows = rows_of(session, image)
    ids = torch.tensor([[token if token >= 0 else MEDIA_IDS["<|image|>"] for token in prompt.ids]])
    original = model.model.get_image_features
    with torch.no_grad():
        expected = original(torch.from_numpy(image.patches())[None], torch.from_numpy(image.positions())[None], return_dict=True)
        expected.pooler_output = (torch.from_numpy(rows),)
        model.model.get_image_features = lambda *_, **__: expected
        try:
            pixels, positions = torch.from_numpy(image.patches())[None], torch.from_numpy(image.positions())[None]
            kinds = (ids == MEDIA_IDS["<|image|>"]).long()
            reference = model(input_ids=ids, pixel_values=pixels, image_position_ids=positions, mm_token_type_ids=kinds).logits[0].numpy()
        finally:
            model.model.get_image_features = original
    session.target.rollback(0)
    list(session.generate(prompt, max_tokens=1, draft_length=0))
    session.target.rollback(len(prompt.ids) - 1)
    ours = session.target.verify(prompt.ids[-1:])[0]
    assert np.abs(ours - reference[-1]).max() < 0.05
    blank = session.generate([token for token in prompt.ids if token >= 0], max_tokens=1, draft_length=0)
    list(blank)
    session.target.rollback(len(blank.prompt) - 1)
    assert np.abs(session.target.verify(blank.prompt[-1:])[0] - reference[-1]).max() > 0.2  # the picture matters


def test_a_span_that_is_cut_goes_on(session):
    image = picture(144, 192, 7)
    prompt = session.media_prompt(placed(image, before=TEXT[:3], after=TEXT[3:]), [image])
    whole = session.generate(prompt, max_tokens=8, draft_length=0)
    list(whole)
    session.target.rollback(9)  # inside of the picture
    rest = session.generate(prompt, max_tokens=8, draft_length=0, reuse_prefix=True)
    list(rest)
    assert rest.stats.reused_tokens == 9
    assert rest.tokens == whole.tokens


def test_lookup_copies_no_soft_rows(folders, probe_memory):
    with open_session(folders["bundle"], drafter="lookup", threads=1) as session:
        image = picture(48, 96, 9)
        again = [50, 51, 52, MEDIA_IDS["<|image|>"], 60, 50, 51]
        prompt = session.media_prompt(again, [image])
        session.target.rollback(0)
        list(session.generate(prompt, max_tokens=1, draft_length=0))
        assert session.drafter.draft(52, 4) == [MEDIA_IDS["<|image>"]]
        tokens = session.generate(prompt, max_tokens=20, draft_length=3)
        list(tokens)
        assert min(tokens.tokens) >= 0


def test_what_does_not_fit_is_refused(session):
    with pytest.raises(RequestError, match="1 places for media, but there are 2"):
        session.media_prompt(placed(picture(48, 48, 1), before=[2], after=[3]), [picture(48, 48, 1)] * 2)
    with pytest.raises(RequestError, match="media 1 is a sound"):
        session.media_prompt([2, MEDIA_IDS["<|image|>"], 3], [noise(900)])
    with pytest.raises(RequestError, match="longer than this encoder's 2048 pixels"):
        rows_of(session, picture(48, 2064, 1))
    with pytest.raises(RequestError, match="no token id"):
        list(session.generate([2, -5, 3]))


@pytest.mark.parametrize("change", [b"gemma4v", b"clip.use_gelu", b"v.blk.1.ln1.weight", b"a.blk.0.conv_dw.weight"])
def test_a_damaged_encoder_is_refused(change, folders, tmp_path):
    data = (next(folders["bundle"].glob("mmproj-*"))).read_bytes()
    assert data.count(change)
    path = tmp_path / "encoder.gguf"
    path.write_bytes(data.replace(change, b"x" + change[1:]))
    with pytest.raises(BackendError, match="export the bundle again"):
        check_encoder(path, 64)
    with pytest.raises(BackendError, match="projection_dim is '64', not 65"):
        check_encoder(next(folders["bundle"].glob("mmproj-*")), 65)


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [
        ("clip.has_vision_encoder", struct.pack("<I?", 7, True), struct.pack("<IB", 0, 1)),
        ("clip.vision.patch_size", struct.pack("<II", 4, 16), struct.pack("<Ii", 5, 16)),
        ("clip.vision.attention.layer_norm_epsilon", struct.pack("<If", 6, 1e-6), struct.pack("<If", 6, -1e-6)),
        ("clip.audio.attention.layer_norm_epsilon", struct.pack("<If", 6, 1e-6), struct.pack("<If", 6, float("nan"))),
        ("clip.vision.image_mean", struct.pack("<IIQ", 9, 6, 3), struct.pack("<IIQ", 9, 5, 3)),
    ],
    ids=["bool", "unsigned", "negative", "not a number", "floats"],
)
def test_what_would_end_the_process_is_refused(key, before, after, folders, tmp_path):
    data = (next(folders["bundle"].glob("mmproj-*"))).read_bytes()
    name = struct.pack("<Q", len(key)) + key.encode()
    assert data.count(name + before) == 1
    path = tmp_path / "encoder.gguf"
    path.write_bytes(data.replace(name + before, name + after))
    with pytest.raises(BackendError, match=f"{key}.*export the bundle again"):
        check_encoder(path, 64)
    path.write_bytes(data[:100])
    with pytest.raises(BackendError, match="fetch it again"):
        check_encoder(path, 64)


def test_the_command_answers_about_an_image(folders, tmp_path, probe_memory):
    from click.testing import CliRunner

    from edge_runtime.cli.run import main

    pillow = pytest.importorskip("PIL.Image")
    texts = []
    for seed, more in ((1, ["--verify-lossless"]), (2, [])):
        pillow.fromarray(picture(96, 96, seed).rgb).save(tmp_path / "photo.png")
        options = "--image-rows 70 --max-tokens 12 --json"
        arguments = ["generate", str(folders["bundle"]), "--image", str(tmp_path / "photo.png"), *options.split()]
        done = CliRunner().invoke(main, [*arguments, "--drafter", "dense", *more, "what is this"])
        assert done.exit_code == 0, done.output
        record = json.loads(done.stdout.splitlines()[-1])
        assert record["stats"]["prompt_tokens"] > 64
        assert not more or record["lossless"]["equal"]
        texts.append(record["text"])
    assert texts[0] != texts[1]


def test_the_command_needs_an_encoder_and_one_prompt(exported_pair, tmp_path, probe_memory):
    from click.testing import CliRunner

    from edge_runtime.cli.run import main

    done = CliRunner().invoke(main, ["generate", str(exported_pair), "--image", "photo.jpg", "--drafter", "none", "what"])
    assert done.exit_code == 1
    assert "this bundle has no encoder of images and sound" in done.stderr
    done = CliRunner().invoke(main, ["generate", str(exported_pair), "--image", "photo.jpg"])
    assert done.exit_code == 2
    assert "Missing argument 'PROMPT'" in done.stderr
