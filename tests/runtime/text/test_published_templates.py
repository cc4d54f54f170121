"""The published chat templates in llama.cpp's sources: each renders as in transformers; calls of Google's for Gemma 4 parse back."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs edge-mtp[verify]")
pytestmark = pytest.mark.peer

from transformers.utils.chat_template_utils import render_jinja_template

from edge_runtime.text.template_renderer import Renderer, TemplateError
from edge_runtime.text.tool_calls import parse_tool_call

NAMES = ("google-gemma-4-31B-it.jinja", "google-gemma-4-31B-it-interleaved.jinja")
ARGUMENTS = {"city": 'Bern "old town"', "days": 3, "hourly": True, "places": ["a", "b, c"], "more": {"unit": "C", "low": -1.5}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where"},
                    "days": {"type": "integer"},
                    "places": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city"],
            },
        },
    }
]
SYSTEM = [{"role": "system", "content": " Be brief. "}]
HELLO = [{"role": "user", "content": "hi\nthere "}]
ANSWERED = [*HELLO, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "bye"}]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
CALLED = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
RETURNED = [*CALLED, {"role": "tool", "tool_call_id": "1", "name": "weather", "content": '{"sky": "blue"}'}]
THOUGHT = [*HELLO, {"role": "assistant", "content": "Hello.", "reasoning_content": "They greet."}, HELLO[0]]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
TALKS = {"hello": HELLO, "answered": ANSWERED, "called": CALLED, "returned": RETURNED, "thought": THOUGHT, "parts": PARTS}


def templates() -> Path:
    folder = Path(os.environ.get("EDGE_MTP_LLAMA_CPP", "")) / "models" / "templates"
    if "EDGE_MTP_LLAMA_CPP" not in os.environ or not folder.is_dir():
        pytest.skip("EDGE_MTP_LLAMA_CPP does not name llama.cpp's sources with models/templates")
    return folder


@pytest.fixture(params=NAMES)
def source(request: pytest.FixtureRequest) -> str:
    return (templates() / request.param).read_text(encoding="utf-8")


def variables(messages: list[dict[str, Any]], *, tools: bool = False, thinking: bool = False, prompt: bool = True) -> dict[str, Any]:
    return {
        "messages": copy.deepcopy(messages),
        "tools": copy.deepcopy(TOOLS) if tools else None,
        "documents": None,
        "add_generation_prompt": prompt,
        "enable_thinking": thinking,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
    }


def rendered(source: str, prompts: Sequence[bool] = (True,)) -> Iterator[tuple[str | None, str | None]]:
    """The text of each conversation, with a prompt for the answer or without, here and in transformers; None where it is refused."""
    try:
        ours = Renderer(source)
    except TemplateError:
        with pytest.raises(Exception):  # noqa: B017, PT011 - jinja2's own
            render_jinja_template([HELLO], chat_template=source)
        return
    for (_, talk), system, tools, thinking, prompt in itertools.product(TALKS.items(), *[(False, True)] * 3, prompts):
        value = variables([*(SYSTEM if system else ()), *talk], tools=tools, thinking=thinking, prompt=prompt)
        texts: list[str | None] = []
        for render in (ours.render, lambda value: render_jinja_template([value.pop("messages")], chat_template=source, **value)[0][0]):
            try:
                texts.append(render(value))
            except Exception:  # noqa: BLE001 - a template may raise anything
                texts.append(None)
        yield texts[0], texts[1]


def test_gemma_4_renders_as_in_transformers(source: str) -> None:
    texts = list(rendered(source, (False, True)))
    assert [own for own, _ in texts] == [theirs for _, theirs in texts]
    assert len({own for own, _ in texts}) > 60


@pytest.mark.slow
def test_all_published_templates_render_as_in_transformers() -> None:
    files = sorted(templates().glob("*.jinja"))
    assert len(files) > 50
    for path in files:
        for own, theirs in rendered(path.read_text(encoding="utf-8")):
            assert own == theirs, path.name


def test_a_call_that_the_template_writes_is_read_back(source: str) -> None:
    text = Renderer(source).render(variables(RETURNED, tools=True))
    raw = text.split("<|tool_call>")[1].split("<tool_call|>")[0]
    call = parse_tool_call(raw)
    assert (call.name, call.arguments) == ("weather", ARGUMENTS)
