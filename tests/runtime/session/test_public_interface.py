"""What a caller of the Python API meets first: options, wrong arguments, text twice, asyncio, help, reprs, one call for one answer."""

from __future__ import annotations

import asyncio
import inspect
import pydoc
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_runtime
from chat_words import chat_session
from edge_runtime import Chat, LoadOptions, RequestError, open_session
from edge_runtime.session.chat import RequestKeywords
from edge_runtime.session.open import faster_backend, open_sessions
from scripted import make_session as scripted_session
from scripted import scripted_sessions


@pytest.mark.parametrize("prompt", [b"abc", None, 5, 1.5, {1: 2}, ["a"], [1.0], [True], [-1], [10**9], [[1]], np.array([0.5])])
def test_prompts_of_wrong_types_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestError, match=r"the prompt (is of type|has .* no token id)"):
        scripted_session().generate(prompt)


@pytest.mark.parametrize("prompt", [[1, 2], (1, 2), np.array([1, 2]), iter([1, 2])])
def test_any_sequence_of_ids_is_a_prompt(prompt: Any) -> None:
    assert scripted_session().generate(prompt).prompt == [1, 2]


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": "5"},
        {"max_tokens": 5.0},
        {"draft_length": "3"},
        {"draft_length": True},
        {"sampling": {"temperature": 1}},
        {"on_round": 5},
        {"stop": [5]},
    ],
)
def test_options_of_wrong_types_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="|".join(options)):
        scripted_session().generate([1], **options)


@pytest.mark.parametrize("message", [None, 5, b"x", ["x"]])
def test_messages_of_wrong_types_are_refused(message: Any) -> None:
    chat = Chat(chat_session("abc"))
    with pytest.raises(RequestError, match="give a str"):
        chat.say(message)
    assert chat.messages == []


def test_a_text_can_be_had_twice_and_after_a_loop_that_was_left() -> None:
    session = scripted_session()
    whole = session.generate([1, 2], max_tokens=9).text()
    generation = session.generate([1, 2], max_tokens=9)
    first = next(iter(generation))
    assert whole.startswith(first)
    assert generation.text() == generation.text() == "".join(generation) == whole


def test_pieces_and_answers_come_with_async_for() -> None:
    async def read() -> tuple[str, str]:
        pieces = [piece async for piece in scripted_session().generate([1, 2], max_tokens=9)]
        return "".join(pieces), "".join([event.text async for event in Chat(chat_session("abc def")).say("x")])

    assert asyncio.run(read()) == (scripted_session().generate([1, 2], max_tokens=9).text(), "abc def")


def test_help_shows_the_options() -> None:
    assert "memory_limit" in pydoc.render_doc(edge_runtime.open_session)
    assert "draft_length" in pydoc.render_doc(edge_runtime.Chat)
    accepted = inspect.signature(edge_runtime.Session.generate).parameters
    assert RequestKeywords.__annotations__.keys() < accepted.keys()
    for shown in (edge_runtime.Chat, edge_runtime.open_session, edge_runtime.Session):
        assert not [word for word in ("ForwardRef", "Ellipsis") if word in pydoc.render_doc(shown)]


def test_a_chat_refuses_options_that_do_not_exist() -> None:
    with pytest.raises(RequestError, match="Chat has no option 'draft_lenght'; the nearest one is 'draft_length'"):
        Chat(chat_session("abc"), draft_lenght=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("call", "option", "belongs"),
    [
        (lambda **options: edge_runtime.open_session("nowhere", **options), "draft_length", "generate(draft_length=...)"),
        (lambda **options: edge_runtime.open_sessions("nowhere", 2, **options), "temperature", "generate(temperature=...)"),
        (lambda **options: scripted_session().generate([1], **options), "context", "open_session(context=...)"),
        (lambda **options: Chat(chat_session("abc"), **options), "temperature", "sampling=SamplingParams(temperature=...)"),
        (lambda **options: Chat(chat_session("abc"), **options), "context", "open_session(context=...)"),
        (lambda **options: edge_runtime.generate("nowhere", "x", **options), "context", "options=LoadOptions(context=...)"),
    ],
)
def test_an_option_of_a_neighbour_is_named_with_it(call: Any, option: str, belongs: str) -> None:
    with pytest.raises(RequestError) as caught:
        call(**{option: 1})
    assert belongs in str(caught.value)


def test_reprs_are_short_and_say_the_state() -> None:
    _, sessions = scripted_sessions(2)
    session = scripted_session()
    generation = session.generate([1, 2], max_tokens=9, draft_length=2)
    assert "not begun" in repr(generation)
    generation.text()
    assert repr(generation).startswith("<Generation length: 9 tokens after 2, '")
    assert "<pre" in generation._repr_html_()
    answer = Chat(chat_session("a<b")).say("x")
    answer.read()
    assert "a&lt;b" in answer._repr_html_()
    for shown in (session, generation, answer, sessions, Chat(session, template=Chat(chat_session("x")).template)):
        assert len(repr(shown)) < 200
    session.close()
    assert repr(session).endswith("closed>")


def test_a_closed_session_refuses_everything_and_closes_again() -> None:
    session = scripted_session()
    generation = session.generate([1, 2])
    session.close()
    session.close()
    for call in (lambda: session.generate([1]), generation.text, session.profit, session.__enter__):
        with pytest.raises(RequestError, match="the session is closed; open the bundle again"):
            call()


def test_a_callback_cannot_use_the_session_inside_of_a_forward() -> None:
    session = scripted_session()

    class Curious:
        def plan(self, *_: Any, **__: Any) -> Any:
            session.generate([1]).text()

    with pytest.raises(RequestError, match="a callback cannot use the session while its request computes"):
        session.generate([1, 2], policy=Curious()).text()  # type: ignore[arg-type]
    assert session.generate([1, 2], max_tokens=4).text() == scripted_session().generate([1, 2], max_tokens=4).text()


def test_a_request_that_was_interrupted_does_not_pretend_to_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    session = scripted_session()
    generation = session.generate([1, 2], max_tokens=9)
    next(generation.rounds())
    with monkeypatch.context() as patch:
        patch.setattr(session.target, "verify", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            generation.text()
    with pytest.raises(RequestError, match=r"interrupted .*; start it again"):
        generation.text()


def test_one_call_for_one_answer(exported_pair: Path, probe_memory: None) -> None:
    options = LoadOptions(context=128, threads=1)
    with edge_runtime.open_session(exported_pair, options) as session:
        text = session.generate("def add(a, b):", max_tokens=12).text()
        answer = Chat(session, max_tokens=12, system="Be short.").say("Hello").read()
    assert edge_runtime.generate(exported_pair, "def add(a, b):", max_tokens=12, options=options) == text
    assert edge_runtime.chat(exported_pair, "Hello", max_tokens=12, system="Be short.", options=options) == answer


def test_sampling_is_given_as_keywords() -> None:
    session = scripted_session()
    drawn = session.generate("abc", max_tokens=6, temperature=1.0, seed=5).text()
    assert drawn == session.generate("abc", max_tokens=6, sampling=edge_runtime.SamplingParams(seed=5)).text()
    assert session.generate("abc", max_tokens=6).text() == session.generate("abc", max_tokens=6, temperature=0).text()
    with pytest.raises(RequestError, match="generate has no option 'temprature'; the nearest one is 'temperature'"):
        session.generate("abc", temprature=1)
    with pytest.raises(RequestError, match="generate has no option 'foo'; it has prompt, max_tokens, "):
        session.generate("abc", foo=1)
    with pytest.raises(RequestError, match="top_p has no effect at temperature 0, which is greedy; give a temperature too"):
        session.generate("abc", top_p=0.5)
    with pytest.raises(RequestError, match="temperature"):
        session.generate("abc", temperature="warm")
    assert inspect.signature(session.generate).parameters["temperature"].default == 0


def test_tokens_are_counted() -> None:
    session = chat_session()
    ids = session.tokenize("abc")
    assert session.generate("abc").prompt == ids
    assert session.count_tokens("abc") == len(ids)
    assert session.count_tokens([{"role": "user", "content": "abc"}]) > len(ids)
    session.close()
    with pytest.raises(RequestError, match="closed"):
        session.tokenize("abc")


@pytest.mark.parametrize("function", [open_session, open_sessions])
def test_the_fields_are_shown_as_keywords(function) -> None:
    shown = inspect.signature(function).parameters
    own = ["folder", "count", "options"] if function is open_sessions else ["folder", "options"]
    assert [*shown] == [*own, *(field.name for field in fields(LoadOptions))]
    assert all(shown[field.name].default == getattr(LoadOptions, field.name) for field in fields(LoadOptions))


def test_keywords_override_the_options(exported_pair: Path) -> None:
    options = LoadOptions(threads=1, context=256, drafter="none", check="none")
    with open_session(exported_pair, options, context=300) as session:
        assert session.settings.context == 300
        assert session.drafter_kind == "none"


@pytest.mark.parametrize("function", [open_session, open_sessions, faster_backend])
def test_an_unknown_keyword_is_named_with_the_nearest(function) -> None:
    with pytest.raises(RequestError, match=f"{function.__name__} has no option 'contxt'; the nearest one is 'context'"):
        function("nowhere", contxt=512)


def test_options_are_checked_either_way() -> None:
    with pytest.raises(RequestError, match="drafter 'fast' is unknown; choose one of dense, split, lookup, none"):
        open_session("nowhere", LoadOptions(drafter="fast"))  # type: ignore[arg-type]
