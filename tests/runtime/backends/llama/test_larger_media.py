"""Images whose rows attend in both directions (12B and larger) on llama.cpp, on tiny random members, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
pytest.importorskip("gguf", reason="needs edge-mtp[export]")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


from edge_export.errors import ExportError
from edge_export.onnx.request import OnnxRequest
from edge_export.pipeline.export import export_pair
from edge_export.pipeline.request import ExportRequest
from edge_runtime.bundle.gguf_gemma4 import check_encoder
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.media.encoder_inputs import Image, Sound
from edge_runtime.session.generation import reusable_prefix
from edge_runtime.session.open import open_session, open_sessions
from edge_runtime.session.session import Session
from tiny_media import MEDIA_IDS, kept_media_pair, noise, picture, reference_rows

LARGER = ["12b", "26b-a4b", "31b"]
TEXT = [2, 40, 41, 42, 300, 310, 320]
# The tiny members' window is 32 rows.
IMAGES = {"inside a window": picture(96, 144, 1), "longer than a window": picture(240, 432, 2)}


@pytest.fixture(scope="module", params=LARGER)
def folders(request) -> dict[str, Any]:
    root = kept_media_pair(member=request.param, context=1024)
    return {"member": request.param, "target": root / "target", "drafter": root / "drafter", "bundle": root / "bundle"}


@pytest.fixture(scope="module")
def model(folders) -> Any:
    kind = "Gemma4Unified" if folders["member"] == "12b" else "Gemma4"
    result = getattr(transformers, f"{kind}ForConditionalGeneration")
    return result.from_pretrained(folders["target"], dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def session(folders, probe_memory) -> Session:
    with open_session(folders["bundle"], drafter="dense", threads=1) as session:
        yield session


def prompt_of(session: Session, *media: Image | Sound, before: list[int] = TEXT[:3], after: list[int] = TEXT[3:]) -> Any:
    places = [MEDIA_IDS["<|image|>" if isinstance(item, Image) else "<|audio|>"] for item in media]
    return session.media_prompt([*before, *places, *after], list(media))


def rows_of(session: Session, media: Image | Sound) -> np.ndarray:
    return session._parts.encoder.rows(media)


def reference_logits(model: Any, prompt: Any, rows: list[np.ndarray], *, bidirectional: bool = True) -> np.ndarray:
    """Logits behind the prompt [vocabulary], with `rows` in the text and the masks that `generate` makes."""
    ids = torch.tensor([[max(token, 0) for token in prompt.ids]])
    kinds = torch.zeros_like(ids)
    with torch.no_grad():
        embedded = model.get_input_embeddings()(ids).clone()
        for span, values in zip(prompt.spans, rows, strict=True):
            embedded[0, span.first : span.first + span.count] = torch.from_numpy(values)
            kinds[0, span.first : span.first + span.count] = int(span.whole and bidirectional)
        places = torch.arange(ids.shape[1])[None]
        masks = model.create_masks_for_generate(model.config, embedded, torch.ones_like(ids), None, places, mm_token_type_ids=kinds)
        hidden = model.model.language_model(inputs_embeds=embedded, attention_mask=masks, position_ids=places).last_hidden_state
        logits = model.lm_head(hidden[0, -1])
        cap = model.config.get_text_config().final_logit_softcapping
        return (torch.tanh(logits / cap) * cap).numpy()


def logits_behind(session: Session, prompt: Any) -> np.ndarray:
    list(session.generate(prompt, max_tokens=1, draft_length=0))
    session.target.rollback(len(prompt.ids) - 1)
    return session.target.verify(prompt.ids[-1:])[0].copy()


@pytest.mark.parametrize("image", [picture(48, 48, 3), picture(96, 144, 4), picture(336, 432, 5)], ids=lambda image: f"{image.rows} rows")
def test_rows_equal_transformers(image, session, model, folders):
    ours = rows_of(session, image)
    expected = unified_rows(model, image) if folders["member"] == "12b" else reference_rows(model, image)
    assert ours.shape == expected.shape == (image.rows, 64)
    assert np.linalg.norm(ours - expected) / np.linalg.norm(expected) < (1e-5 if folders["member"] == "12b" else 5e-3)


@pytest.mark.parametrize("samples", [161, 640, 641, 16_000, 480_000])
def test_raw_sound_equals_transformers(samples, session, model, folders):
    sound = noise(samples)
    if folders["member"] != "12b":
        with pytest.raises(RequestError, match="takes images only"):
            session.media_rows(sound)
        return
    padded = np.zeros((-(-samples // 640), 640), np.float32)
    padded.ravel()[:samples] = sound.samples
    with torch.no_grad():
        expected = model.model.get_audio_features(torch.from_numpy(padded)[None]).pooler_output[0].numpy()
    ours = rows_of(session, sound)
    assert ours.shape == expected.shape == (session.media_rows(sound), 64)
    assert np.linalg.norm(ours - expected) / np.linalg.norm(expected) < 1e-4


def unified_rows(model: Any, image: Image) -> np.ndarray:
    """Rows of the member without a tower: blocks of 48 x 48 pixels, each ordered by row, column and colour."""
    height, width = (side // 48 for side in image.rgb.shape[:2])
    pixels = (image.rgb.astype(np.float32) / 255).reshape(height, 48, width, 48, 3).transpose(0, 2, 1, 3, 4).reshape(height * width, -1)
    y, x = np.divmod(np.arange(height * width), width)
    with torch.no_grad():
        result = model.model.get_image_features(torch.from_numpy(pixels)[None], torch.from_numpy(np.stack([x, y], 1))[None])
    return torch.cat(list(result.pooler_output)).numpy()


@pytest.mark.parametrize("before", [TEXT[:3], TEXT[:3] * 14], ids=["at the beginning", "behind a window"])
@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_logits_behind_an_image_equal_transformers(image, before, session, model, folders):
    prompt = prompt_of(session, image, before=before)
    rows = [rows_of(session, image)]
    ours, expected = logits_behind(session, prompt), reference_logits(model, prompt, rows)
    causal = reference_logits(model, prompt, rows, bidirectional=False)
    # Experts are chosen by near ties, which float16 rows in the cache decide otherwise now and then; text alone differs by as much.
    assert np.abs(ours - expected).max() < (0.5 if folders["member"] == "26b-a4b" else 0.05)
    assert np.abs(ours - causal).max() > 1  # what llama.cpp computes without the flag


def test_two_images_and_text_between(session, model, folders):
    media: list[Image | Sound] = [picture(144, 192, 6), picture(96, 96, 7)]
    if folders["member"] == "12b":
        media.append(noise(9_000))
    prompt = prompt_of(session, *media)
    expected = reference_logits(model, prompt, [rows_of(session, item) for item in media])
    assert np.abs(logits_behind(session, prompt) - expected).max() < 0.05


def test_an_image_is_never_cut(session):
    """A prefix ends before an image or behind it, and a prefill holds the image whole."""
    image = picture(144, 192, 9)
    prompt = prompt_of(session, image)
    fresh = session.generate(prompt, max_tokens=8, draft_length=0)
    list(fresh)
    target, first = session.target, prompt.spans[0].first
    end = first + image.rows
    with pytest.raises(RequestError, match="inside of an image whose rows attend to later ones"):
        target.rollback(first + 5)
    assert reusable_prefix(target, [*prompt.ids[: first + 5], 40]) == first
    assert reusable_prefix(target, [*prompt.ids[:end], 40]) == end
    for length in (first, end):
        target.rollback(length)
        again = session.generate(prompt, max_tokens=8, draft_length=0, reuse_prefix=True)
        list(again)
        assert (again.stats.reused_tokens, again.tokens) == (length, fresh.tokens)
        assert again.stats.media_rows == (image.rows if length == first else 0)


def test_an_image_beyond_the_batch_is_refused(folders, session):
    large = Image(np.zeros((48 * 20, 48 * 28, 3), np.uint8))
    with pytest.raises(RequestError, match="has 560 tokens, but this model's images must fit a batch, which was opened for 512"):
        prompt_of(session, large)
    with pytest.raises(RequestError, match="560 tokens does not fit a batch of 512"):
        session.target.prefill_rows([-1] * 560, np.zeros((560, 64), np.float32), whole=True)
    with open_session(folders["bundle"], drafter="dense", threads=1, image_rows=560) as wider:
        generation = wider.generate(prompt_of(wider, large), max_tokens=4)
        list(generation)
        assert generation.stats.media_rows == 560


def test_other_sequences_stay_causal(folders, session):
    """Between an image of one sequence and a verify of another, the context's mask goes back."""
    image = picture(144, 192, 10)
    alone = []
    for prompt in (prompt_of(session, image), TEXT * 6):
        generation = session.generate(prompt, max_tokens=12, draft_length=0)
        list(generation)
        alone.append(generation.tokens)
    with open_sessions(folders["bundle"], 2, drafter="dense", threads=1) as sessions:
        item, other = sessions.sessions
        text = other.generate(TEXT * 6, max_tokens=12, draft_length=0)
        steps = iter(text)
        next(steps)
        observed = item.generate(prompt_of(item, image), max_tokens=12, draft_length=0)
        list(observed)
        list(text)
        assert [observed.tokens, text.tokens] == alone


def test_restored_rows_keep_their_image(session):
    image = picture(96, 144, 11)
    first = session.generate(prompt_of(session, image), max_tokens=6, draft_length=0)
    list(first)
    tokens, rows = session.target.tokens.tolist(), session.target.state()
    with session.exclusive():
        session.target.rollback(0)
        session.target.restore(tokens, rows)
    longer = prompt_of(session, image, after=[*TEXT[3:], *first.tokens[:-1], 40])
    again = session.generate(longer, max_tokens=2, draft_length=0, reuse_prefix=True)
    list(again)
    assert again.stats.reused_tokens == len(first.prompt) + 5
    with pytest.raises(RequestError, match=r"older rows are gone|inside of an image"):
        session.target.rollback(6)


def test_a_damaged_encoder_is_refused(folders, tmp_path):
    data = (next(folders["bundle"].glob("mmproj-*"))).read_bytes()
    names = [b"gemma4uv", b"gemma4ua", b"v.patch_norm.2.bias"] if folders["member"] == "12b" else [b"gemma4v", b"v.std_bias"]
    for name in names:
        assert data.count(name)
        path = tmp_path / "encoder.gguf"
        path.write_bytes(data.replace(name, b"x" + name[1:]))
        with pytest.raises(BackendError, match="export the bundle again"):
            check_encoder(path, 64)


def test_onnx_graphs_are_refused(folders, tmp_path):
    request = ExportRequest(
        target=str(folders["target"]), drafter=str(folders["drafter"]), output=tmp_path / "b", gguf=False, onnx=OnnxRequest(), media="f32"
    )
    with pytest.raises(ExportError, match="take images and sound of E2B and E4B only"):
        export_pair(request)
    assert not Path(tmp_path / "b").exists()
