"""Clients that people use, beside openai's and Ollama's: LangChain and llm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chat_server import CALL, scripted_server


def test_langchain_chats_streams_calls_and_reads_json() -> None:
    langchain = pytest.importorskip("langchain_openai", reason="needs edge-mtp[dev]")
    from langchain_core.messages import HumanMessage, ToolMessage

    def now(zone: str) -> str:
        """Returns the time in a zone."""
        return zone

    def reply(_: int, output: str) -> str:
        return '{"ok":true}' if "JSON" in output else CALL + "<|tool_response>" if "clock" in output else "Hello, friend."

    with scripted_server(reply, "noon", count=2) as server:
        model = langchain.ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="scripted", temperature=0, max_retries=0)
        assert model.invoke("hi").content == "Hello, friend."
        assert model.invoke("hi").usage_metadata["input_tokens"] > 0
        assert "".join(str(chunk.content) for chunk in model.stream("hi")) == "Hello, friend."
        assert [answer.content for answer in model.batch(["hi", "ho"])] == ["Hello, friend."] * 2
        answer = model.bind_tools([now]).invoke("clock?")
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("now", {"zone": "UTC"})]
        result = ToolMessage("12:00", tool_call_id=answer.tool_calls[0]["id"])
        assert model.bind_tools([now]).invoke([HumanMessage("clock?"), answer, result]).content == "noon"
        assert model.bind(logprobs=True, top_logprobs=2).invoke("hi").response_metadata["logprobs"]["content"][0]["token"] == "H"
        responses = langchain.ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="scripted", use_responses_api=True)
        assert responses.invoke("hi").text == "Hello, friend."
        pytest.importorskip("llguidance", reason="needs edge-mtp[grammar]")
        schema = {"title": "Answer", "type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"]}
        assert model.with_structured_output(schema, method="json_schema").invoke("JSON?") == {"ok": True}
        demanded = model.bind_tools([now], tool_choice="now", parallel_tool_calls=False).bind(max_tokens=60).invoke("hi, clock")
        assert demanded.tool_calls[0]["name"] == "now"


def test_llm_prompts_and_continues(tmp_path: Path) -> None:
    pytest.importorskip("llm", reason="needs edge-mtp[dev]")
    with scripted_server("Hello, friend.", "Hello again.") as server:
        entry = {"model_id": "mine", "model_name": "scripted", "api_base": f"{server.url}/v1", "api_key_name": "none"}
        (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]), encoding="utf-8")
        (tmp_path / "keys.json").write_text('{"none": "none"}', encoding="utf-8")
        environment: dict[str, Any] = os.environ | {"LLM_USER_PATH": str(tmp_path)}

        def llm(*words: str) -> str:
            command = [sys.executable, "-m", "llm", *words]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, stdin=subprocess.DEVNULL)
            assert done.returncode == 0, done.stderr
            return done.stdout.strip()

        assert llm("-m", "mine", "hi", "-o", "temperature", "0", "-s", "Be brief.") == "Hello, friend."
        assert llm("-c", "and?") == "Hello again."
