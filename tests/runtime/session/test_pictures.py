"""A trained pair that names coloured digits: a picture decides what both backends answer, everywhere a picture can be given."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

for library in ("llama_cpp", "onnxruntime", "gguf", "onnx", "PIL"):
    pytest.importorskip(library)

from edge_runtime.cli.chat import TerminalChat
from edge_runtime.cli.prompts import MessageOptions, sent_prompt
from edge_runtime.errors import RequestError
from edge_runtime.media.reading import read_image
from edge_runtime.media.soft_rows import MediaPrompt
from edge_runtime.session.chat import Chat
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session
from pictures import SCENES, colours, photo, picture_bundle

QUESTION = "What is this?"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    return picture_bundle()


@pytest.fixture(scope="module", params=["llama", "onnx"])
def session(request, bundle, probe_memory) -> Session:
    with open_session(bundle, backend=request.param, threads=1) as session:
        yield session


def answer(session: Session, text: str, **options: Any) -> Any:
    media = options.pop("media", ())
    chat = Chat(session, max_tokens=48, **options)
    result = chat.say(text, media)
    result.read()
    return result


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.ground)
def test_the_picture_decides_the_answer(scene, session):
    item = answer(session, QUESTION, media=[read_image(photo(scene, "JPEG"), 70)], draft_length=3)
    assert item.stats.media_rows == 64
    assert 0 < item.stats.encode_seconds < item.stats.prefill_seconds
    assert colours(item.text) == [scene.colour, scene.ground], item.text


def test_a_memory_limit_counts_the_encoder(bundle, probe_memory):
    with open_session(bundle, backend="llama", threads=1, memory_limit="10GB") as session:
        needed = session._parts.encoder._memory._beside
    with open_session(bundle, backend="llama", threads=1, memory_limit=needed) as session:
        assert answer(session, f"{SCENES[0].words}{QUESTION}").text
        with pytest.raises(RequestError, match="leaves 0 B"):
            answer(session, QUESTION, media=[read_image(photo(SCENES[0]), 70)])


def test_drafts_behind_a_picture_are_as_good_as_behind_text(session):
    """Over all scenes, within 5 points, and the texts are those without drafts."""
    rates = {}
    for kind in ("picture", "words"):
        drafted = accepted = 0
        for scene in SCENES:
            media = [read_image(photo(scene), 70)] if kind == "picture" else []
            text = QUESTION if media else f"{scene.words}{QUESTION}"
            item = answer(session, text, media=media, draft_length=3)
            assert item.text == answer(session, text, media=media, draft_length=0).text
            drafted, accepted = drafted + item.stats.drafted, accepted + item.stats.accepted
        rates[kind] = accepted / drafted
    assert abs(rates["picture"] - rates["words"]) < 0.05, rates
    assert min(rates.values()) > 0.5


def test_a_conversation_keeps_its_pictures(session):
    chat = Chat(session, max_tokens=48)
    assert colours(chat.say("What colour is it?", [read_image(photo(SCENES[0]), 70)]).read()) == ["red", "white"]
    second = chat.say("What colour is it?", [read_image(photo(SCENES[2]), 70)])
    second.read()
    assert second.stats.reused_tokens > 64  # the first picture and its answer
    with pytest.raises(RequestError, match="cannot be saved"):
        chat.save("chat.json")


def test_a_full_context_drops_whole_turns_with_their_pictures(session):
    chat = Chat(session, max_tokens=48)
    dropped = 0
    for scene in SCENES * 2:
        item = chat.say("What colour is it?", [read_image(photo(scene), 70)])
        item.read()
        dropped += item.dropped_turns
        assert sum(len(message.get("media", ())) for message in chat.messages) == sum(m["role"] == "user" for m in chat.messages)
        if dropped:
            return
    raise AssertionError("nothing was dropped")


def test_a_system_message_stands_before_the_picture_and_its_text(session):
    sent = sent_prompt(session, QUESTION, MessageOptions(system="Be brief."), media=[read_image(photo(SCENES[0]), 70)]).sent
    assert isinstance(sent, MediaPrompt)
    (span,) = sent.spans
    before, after = (
        b"".join(session.vocabulary.piece(token) for token in ids if token >= 0).decode()
        for ids in (sent.ids[: span.first], sent.ids[span.first :])
    )
    assert ("Be brief." in before, QUESTION in after) == (True, True)


def test_penalties_and_constraints_ignore_soft_rows(session):
    from edge_runtime.decoding.sampling import SamplingParams
    from edge_runtime.text.constraints import Regex

    image = read_image(photo(SCENES[1]), 70)
    penalized = answer(session, QUESTION, media=[image], sampling=SamplingParams(repetition_penalty=1.05, temperature=0))
    assert colours(penalized.text) == ["yellow", "blue"]
    forced = answer(session, "What colour is it?", media=[image], constraint=Regex("The digit is [a-z]+, and the ground is [a-z]+\\."))
    assert colours(forced.text) == ["yellow", "blue"]


def test_the_chat_takes_files(session, tmp_path, monkeypatch, capsys):
    import io

    path = tmp_path / "photo.png"
    path.write_bytes(photo(SCENES[0]))
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/image {path}\n{QUESTION}\n"))
    TerminalChat(Chat(session, max_tokens=48), lines=True).run()
    printed = capsys.readouterr()
    assert colours(printed.out) == ["red", "white"], printed
    assert "tokens of the context" in printed.err + printed.out


@pytest.fixture(scope="module", params=["llama", "onnx"])
def server(request, bundle, probe_memory) -> Any:
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    from chat_server import Child

    child = Child(bundle, "--backend", request.param, "--context", "512")
    yield child
    assert child.end() == 0, child.lines


def post(server: Any, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    from chat_server import send

    status, _, result = send(server, "POST", path, body)
    return status, result


def ask(server: Any, *parts: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    message = {"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}
    return post(server, "/v1/chat/completions", {"model": "m", "messages": [message], "temperature": 0, "max_tokens": 48})


def image_part(data: bytes, kind: str = "png", detail: str = "low") -> dict[str, Any]:
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url, "detail": detail}}


def test_the_server_takes_pictures(server):
    for scene in SCENES[:2]:
        status, body = ask(server, image_part(photo(scene, "WEBP"), "webp"))
        assert status == 200, body
        assert colours(body["choices"][0]["message"]["content"]) == [scene.colour, scene.ground]
    assert body["usage"]["prompt_tokens"] > 64
    message = {"role": "user", "content": [image_part(photo(SCENES[1])), {"type": "text", "text": QUESTION}]}
    status, counted = post(server, "/v1/chat/completions/input_tokens", {"messages": [message]})
    assert (status, counted["input_tokens"]) == (200, body["usage"]["prompt_tokens"])


def test_other_apis_take_pictures_too(server):
    data = base64.b64encode(photo(SCENES[2])).decode()
    parts = [
        {"type": "input_image", "image_url": f"data:image/png;base64,{data}", "detail": "low"},
        {"type": "input_text", "text": QUESTION},
    ]
    body = {"model": "m", "input": [{"role": "user", "content": parts}], "temperature": 0, "max_output_tokens": 48}
    status, result = post(server, "/v1/responses", body)
    assert status == 200, result
    assert colours(result["output"][0]["content"][0]["text"]) == ["black", "green"]
    status, result = post(
        server, "/api/chat", {"model": "m", "stream": False, "messages": [{"role": "user", "content": QUESTION, "images": [data]}]}
    )
    assert status == 200, result


def test_what_is_no_picture_is_refused_by_the_server(server):
    status, body = ask(server, image_part(b"GIF89a", "png"))
    assert (status, "convert it to jpeg, png" in body["error"]["message"]) == (400, True)


def test_sound_without_an_audio_tower_is_refused(session):
    from tiny_media import noise

    with pytest.raises(RequestError, match="images only"):
        session.media_rows(noise(16_000))
