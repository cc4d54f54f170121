"""Ollama's API through its own Python client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

ollama = pytest.importorskip("ollama", reason="needs edge-mtp[dev]")

from chat_server import CALL, HI, scripted_server
from edge_runtime.server.apis.ollama import read_ollama_generate


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with (
        scripted_server(f"<|channel>thought\nclock<channel|>so {CALL}<|tool_response>", "noon", count=2) as running,
        ollama.Client(host=running.url) as client,
    ):
        yield client


def now(zone: str) -> str:
    """Returns the time."""
    return zone


def test_a_chat_with_thoughts_and_a_call(client: Any) -> None:
    answer = client.chat(model="scripted", messages=HI, tools=[now], think=True, options={"temperature": 0, "num_ctx": 4096, "num_gpu": 1})
    assert (answer.message.thinking, answer.message.content, answer.done, answer.done_reason) == ("clock", "so ", True, "stop")
    call = answer.message.tool_calls[0].function
    assert (call.name, call.arguments) == ("now", {"zone": "UTC"})
    assert answer.eval_count > 5
    assert answer.prompt_eval_count > 5
    messages = [*HI, answer.message, {"role": "tool", "tool_name": "now", "content": "12:00"}]
    assert client.chat(model="scripted", messages=messages, tools=[now]).message.content == "noon"
    lines = list(client.chat(model="scripted", messages=HI, tools=[now], stream=True))
    assert "".join(line.message.content or "" for line in lines) == "so "
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert [call.function.name for line in lines for call in line.message.tool_calls or []] == ["now"]


def test_generate_and_limits(client: Any) -> None:
    whole = client.generate(model="scripted", prompt="hi", system="Be brief.")
    assert (whole.response, whole.thinking) == ("so ", "clock")
    lines = list(client.generate(model="scripted", prompt="hi", stream=True))
    assert "".join(line.response for line in lines) == "so "
    cut = client.generate(model="scripted", prompt="hi", options={"num_predict": 3, "stop": ["zzz"], "seed": 1})
    assert (cut.done_reason, cut.eval_count) == ("length", 3)
    assert client.generate(model="scripted").done_reason == "load"
    assert client.chat(model="scripted").done_reason == "load"
    assert client.chat(model="scripted", messages=[], keep_alive=60).done_reason == "load"


@pytest.mark.parametrize("field", [{"format": "json"}, {"logprobs": True}, {"think": True}, {"system": "Be brief."}])
def test_raw_prompts_have_no_fields_of_a_chat(client: Any, field: dict[str, Any]) -> None:
    with pytest.raises(ollama.ResponseError, match=f"{next(iter(field))} is not supported; raw prompts"):
        client.generate(model="scripted", prompt="hi", raw=True, **field)
    (choice,) = read_ollama_generate({"prompt": "hi", "raw": True, "think": False, "system": "", "format": ""}).choices
    assert choice.prompt == "hi"


def test_the_model_is_listed_and_described(client: Any) -> None:
    assert [model.model for model in client.list().models] == ["scripted:latest"]
    assert [model.model for model in client.ps().models] == ["scripted:latest"]
    shown = client.show("scripted:latest")
    assert (shown.details.family, shown.modelinfo["gemma4.context_length"]) == ("gemma4", 2048)
    assert "tools" in shown.capabilities
    with pytest.raises(ollama.ResponseError, match="no such model") as caught:
        client.show("other")
    assert caught.value.status_code == 404


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": [{"role": "user", "content": "x", "images": [b"0"]}]}, "no encoder of images"),
        ({"messages": HI, "options": {"temperature": 9}}, "0 to 2"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "result of no call"),
    ],
)
def test_refusals_are_ollamas_own_kind(client: Any, fields: Any, says: str) -> None:
    with pytest.raises(ollama.ResponseError, match=says) as caught:
        client.chat(model="scripted", **fields)
    assert caught.value.status_code == 400


def test_a_pull_is_told_what_to_run_instead(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match=r"edge-export pair NAME.*edge-run serve FOLDER") as caught:
        client.pull("gemma3")
    assert caught.value.status_code == 400
