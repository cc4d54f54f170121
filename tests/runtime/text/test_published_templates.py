"""Google's chat templates for Gemma 4, from llama.cpp's sources: the sandbox renders them as plain Jinja does, and answers parse back."""

from __future__ import annotations

import copy
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

jinja2 = pytest.importorskip("jinja2")
pytestmark = pytest.mark.peer

from edge_runtime.text.template.renderer import Renderer
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


@pytest.fixture(params=NAMES)
def source(request: pytest.FixtureRequest) -> str:
    folder = Path(os.environ.get("EDGE_MTP_LLAMA_CPP", "")) / "models" / "templates"
    if "EDGE_MTP_LLAMA_CPP" not in os.environ or not (folder / request.param).is_file():
        pytest.skip(f"EDGE_MTP_LLAMA_CPP does not name llama.cpp's sources with models/templates/{request.param}")
    return (folder / request.param).read_text(encoding="utf-8")


def variables(messages: list[dict[str, Any]], *, tools: bool = False, thinking: bool = False, prompt: bool = True) -> dict[str, Any]:
    return {
        "messages": copy.deepcopy(messages),
        "tools": copy.deepcopy(TOOLS) if tools else None,
        "add_generation_prompt": prompt,
        "enable_thinking": thinking,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
    }


def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def test_the_sandbox_renders_as_plain_jinja(source: str) -> None:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals["raise_exception"] = refuse
    plain, ours, observed = environment.from_string(source), Renderer(source), set()
    for (_, talk), system, tools, thinking, prompt in itertools.product(TALKS.items(), *[(False, True)] * 4):
        value = {"tools": tools, "thinking": thinking, "prompt": prompt}
        messages = [*(SYSTEM if system else ()), *talk]
        text = ours.render(variables(messages, **value))
        assert text == plain.render(variables(messages, **value))
        observed.add(text)
    assert len(observed) > 60


def test_a_call_that_the_template_writes_is_read_back(source: str) -> None:
    text = Renderer(source).render(variables(RETURNED, tools=True))
    raw = text.split("<|tool_call>")[1].split("<tool_call|>")[0]
    call = parse_tool_call(raw)
    assert (call.name, call.arguments) == ("weather", ARGUMENTS)
