"""What clients of OpenAI, llama-server, vLLM and Ollama send: values that mean none, fields of other servers, histories of other models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from chat_server import CHAT, HI, Scripted, scripted_server, send
from edge_runtime.server.apis.ollama import read_ollama_chat
from edge_runtime.server.apis.responses_api import read_response
from edge_runtime.server.errors import ApiError
from edge_runtime.server.requests.completions import read_chat, read_completion

LONG = "A stack is a list whose last item is taken first, ### and more."
READ: Any = {
    "/v1/chat/completions": lambda **fields: read_chat({"messages": HI, **fields}),
    "/v1/completions": lambda **fields: read_completion({"prompt": "x", **fields}),
    "/v1/responses": lambda **fields: read_response({"input": "hi", **fields}),
}
FUNCTION: Any = {"name": "now", "parameters": {"type": "object", "properties": {}}}
TOOL: Any = {"type": "function", "function": FUNCTION}
CALL: Any = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with scripted_server(LONG, count=2) as running:
        yield running


def answered(server: Scripted, path: str = CHAT, **fields: Any) -> Any:
    body = {"messages": HI, "temperature": 0} if path == CHAT else {}
    status, _, answer = send(server, "POST", path, {**body, **fields})
    assert status == 200, answer
    return answer


def text_of(server: Scripted, **fields: Any) -> str:
    content: str = answered(server, **fields)["choices"][0]["message"]["content"]
    return content


@pytest.mark.parametrize("path", READ)
@pytest.mark.parametrize("seed", [-1, 2**32 - 1, None])
def test_no_seed_is_a_new_one_each_time(path: str, seed: int | None) -> None:
    choices = READ[path](seed=seed).choices
    assert [(choice.sampling.seed, choice.repeatable) for choice in choices] == [(None, False)]


def test_seeds_are_kept() -> None:
    assert [read_chat({"messages": HI, "seed": seed}).choices[0].sampling.seed for seed in (0, 7, 2**64 - 1)] == [0, 7, 2**64 - 1]
    assert [choice.sampling.seed for choice in read_chat({"messages": HI, "seed": 7, "n": 2}).choices] == [7, 8]
    assert {choice.sampling.seed for choice in read_chat({"messages": HI, "seed": -1, "n": 2}).choices} == {None}


@pytest.mark.parametrize("fields", [{"max_tokens": -1}, {"max_completion_tokens": -1}, {"n_predict": -1}, {"n_predict": -2}, {}])
def test_no_limit_is_the_whole_answer(server: Scripted, fields: Any) -> None:
    assert text_of(server, **fields) == LONG
    if "max_completion_tokens" not in fields:
        assert read_completion({"prompt": "x", **fields}).choices[0].max_tokens == (None if fields else 16)


def test_limits_by_every_name(server: Scripted) -> None:
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        assert text_of(server, **{name: 7}) == "A stack"
    assert read_chat({"messages": HI, "max_tokens": 9, "max_completion_tokens": 7}).choices[0].max_tokens == 7
    assert read_response({"input": "hi", "max_output_tokens": -1}).choices[0].max_tokens is None
    for limit in (-1, -2, 0, None):
        request = read_ollama_chat({"messages": HI, "options": {"num_predict": limit}})
        assert request is not None
        assert request.choices[0].max_tokens is None


@pytest.mark.parametrize(("stop", "text"), [("", LONG), ([""], LONG), (["", "###"], LONG.partition("###")[0]), ([], LONG), (None, LONG)])
def test_empty_stop_strings_stop_nothing(server: Scripted, stop: Any, text: str) -> None:
    assert text_of(server, stop=stop) == text
    assert answered(server, "/api/chat", messages=HI, stream=False, options={"stop": stop})["message"]["content"] == text


def test_filters_and_penalties_that_are_off() -> None:
    for top_k in (-1, 0, None):
        assert read_chat({"messages": HI, "top_k": top_k}).choices[0].sampling.top_k == 0
    assert read_chat({"messages": HI, "top_p": 0}).choices[0].sampling.top_p == 0
    for fields in ({"repeat_penalty": 0}, {"repeat_penalty": 1}, {"repetition_penalty": 0}, {"repeat_penalty": 1.3, "repeat_last_n": 0}):
        (choice,) = read_chat({"messages": HI, "frequency_penalty": 0, **fields}).choices
        assert not choice.sampling.penalises
        assert "repetition_penalty" in choice.sampling_fields, "the bundle's own does not count"
    (choice,) = read_chat({"messages": HI, "repeat_penalty": 1.3, "repeat_last_n": -1}).choices
    assert (choice.sampling.repetition_penalty, choice.sampling.penalty_window > 1e6) == (1.3, True)
    assert read_chat({"messages": HI, "repeat_last_n": 5}).choices[0].sampling.penalty_window == 5
    request = read_ollama_chat({"messages": HI, "options": {"repeat_penalty": 1.2, "repeat_last_n": 7, "top_k": -1, "seed": -1}})
    assert request is not None
    sampling = request.choices[0].sampling
    assert (sampling.repetition_penalty, sampling.penalty_window, sampling.top_k, sampling.seed) == (1.2, 7, 0, None)


OPTIONAL = (
    *("audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens"),
    *("metadata", "modalities", "n", "parallel_tool_calls", "prediction", "presence_penalty", "prompt_cache_key", "reasoning_effort"),
    *("response_format", "safety_identifier", "seed", "service_tier", "stop", "store", "stream", "stream_options", "temperature"),
    *("tool_choice", "tools", "top_logprobs", "top_p", "user", "verbosity", "web_search_options", "top_k", "min_p", "grammar", "n_predict"),
    *("repeat_penalty", "json_schema", "ignore_eos", "min_tokens", "draft_length", "chat_template_kwargs", "never_heard_of"),
)


def test_empty_values_ask_for_nothing(server: Scripted) -> None:
    empty = {"stream_options": {}, "response_format": {}, "tools": [], "logit_bias": {}, "metadata": {}, "functions": [], "grammar": ""}
    assert text_of(server, **empty) == LONG
    off = {"stream_options": {"include_usage": False}, "top_logprobs": 0, "logprobs": False, "tool_choice": "none", "logit_bias": []}
    assert text_of(server, **off) == LONG
    assert answered(server, "/v1/responses", input="hi", tools=[], include=[], text={}, reasoning={}, metadata={})["status"] == "completed"


def test_null_is_a_field_that_is_not_there(server: Scripted) -> None:
    assert text_of(server, **dict.fromkeys(OPTIONAL)) == LONG
    response = dict.fromkeys(
        (
            *("background", "conversation", "include", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "prompt"),
            *("previous_response_id", "reasoning", "service_tier", "store", "stream", "stream_options", "text", "tool_choice", "tools"),
            *("top_logprobs", "top_p", "truncation", "user"),
        )
    )
    assert answered(server, "/v1/responses", input="hi", **response)["status"] == "completed"
    inner = {"text": {"format": None, "verbosity": None}, "reasoning": {"effort": None, "summary": None}}
    assert answered(server, "/v1/responses", input="hi", **inner)["status"] == "completed"
    completion = ("best_of", "echo", "logit_bias", "logprobs", "max_tokens", "n", "stop", "suffix", "stream_options", "user")
    assert answered(server, "/v1/completions", prompt="<|turn>model\n", **dict.fromkeys(completion))["choices"]
    ollama = ("format", "keep_alive", "options", "think", "tools", "logprobs", "top_logprobs")
    assert answered(server, "/api/chat", messages=HI, stream=False, **dict.fromkeys(ollama))["message"]["content"] == LONG
    null = dict.fromkeys(("content", "images", "thinking", "tool_calls", "tool_name"))
    messages = [{**null, **HI[0]}, {**null, "role": "assistant"}, HI[0]]
    assert answered(server, "/api/chat", messages=messages, stream=False)["message"]["content"] == LONG


# openai-python's model_dump() of a message, LangChain's and the AI SDK's messages, and those of other servers.
HISTORIES: Any = {
    "openai-python": {
        **{"role": "assistant", "content": "Yes.", "refusal": None, "annotations": [], "audio": None, "function_call": None},
        **{"tool_calls": None, "reasoning_content": "hm", "name": None},
    },
    "no content": {"role": "assistant"},
    "empty calls": {"role": "assistant", "content": "Yes.", "tool_calls": []},
    "refusal": {"role": "assistant", "content": None, "refusal": "I can't."},
    "refusal part": {"role": "assistant", "content": [{"type": "refusal", "refusal": "I can't."}]},
    "text and refusal": {"role": "assistant", "content": [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "No."}]},
    "empty parts": {"role": "assistant", "content": []},
    "texts as parts": {"role": "assistant", "content": ["Well, ", "yes."]},
    "types of responses": {"role": "assistant", "content": [{"type": "output_text", "text": "Yes.", "annotations": []}]},
    "thinking part": {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Yes."}]},
    "vLLM's thoughts": {"role": "assistant", "content": "Yes.", "reasoning": "hm"},
    "OpenRouter's thoughts": {"role": "assistant", "content": "Yes.", "reasoning": {"text": "hm"}, "reasoning_details": [{}]},
    "audio of before": {"role": "assistant", "content": None, "audio": {"id": "audio_1"}},
    "cache marks": {"role": "assistant", "content": [{"type": "text", "text": "Yes.", "cache_control": {"type": "ephemeral"}}]},
}


@pytest.mark.parametrize("kind", HISTORIES)
def test_histories_are_taken_back(server: Scripted, kind: str) -> None:
    assert text_of(server, messages=[*HI, HISTORIES[kind], {"role": "user", "content": "And?", "name": "me"}]) == LONG


def test_what_histories_say_reaches_the_model() -> None:
    def content(message: Any) -> Any:
        prompt = read_chat({"messages": [*HI, message, *HI]}).choices[0].prompt
        return prompt.messages[1]  # type: ignore[union-attr]

    assert content(HISTORIES["refusal"])["content"] == content(HISTORIES["refusal part"])["content"] == "I can't."
    assert content(HISTORIES["text and refusal"])["content"] == "Well.No."
    assert content(HISTORIES["texts as parts"])["content"] == "Well, yes."
    assert content(HISTORIES["thinking part"])["content"] == "Yes."
    assert content(HISTORIES["vLLM's thoughts"])["reasoning_content"] == "hm"


CALLS: Any = {
    "tools": ({"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c1", "content": "12:00"}),
    "function": (
        {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}},
        {"role": "function", "name": "now", "content": "12:00"},
    ),
    "custom": (
        {"role": "assistant", "tool_calls": [{"id": "c1", "type": "custom", "custom": {"name": "now", "input": "UTC"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "12:00"}]},
    ),
}


@pytest.mark.parametrize("kind", CALLS)
def test_calls_of_every_kind_come_back_with_their_results(server: Scripted, kind: str) -> None:
    assert text_of(server, messages=[*HI, *CALLS[kind]]) == LONG
    call, result = read_chat({"messages": [*HI, *CALLS[kind]]}).choices[0].prompt.messages[1:]  # type: ignore[union-attr]
    assert call["tool_calls"][0]["function"]["name"] == result["name"] == "now"
    assert call["tool_calls"][0]["id"] == result["tool_call_id"]
    assert call["tool_calls"][0]["function"]["arguments"] == ({"input": "UTC"} if kind == "custom" else {})


def test_a_result_of_no_function_is_refused(server: Scripted) -> None:
    status, _, body = send(server, "POST", CHAT, {"messages": [*HI, {"role": "function", "name": "then", "content": "x"}]})
    assert (status, body["error"]["param"]) == (400, "messages[1].name")


def test_ollamas_results_find_their_calls_by_number_by_name_or_in_order() -> None:
    def found(calls: Any, results: Any) -> list[str]:
        request = read_ollama_chat({"messages": [*HI, {"role": "assistant", "content": "", "tool_calls": calls}, *results]})
        assert request is not None
        return [message["tool_call_id"][-1] for message in request.choices[0].prompt.messages[2:]]  # type: ignore[union-attr]

    numbered = [{"id": f"c{i}", "function": {"name": "now", "arguments": {"n": i}}} for i in range(2)]
    assert found(numbered, [{"role": "tool", "tool_call_id": f"c{i}", "content": str(i)} for i in (1, 0)]) == ["1", "0"]
    calls = [{"function": {"name": name, "arguments": {}}} for name in "aabbc"]
    results = [{"role": "tool", "content": "x"} | ({"tool_name": name} if name else {}) for name in ("b", None, "a", "c", None)]
    assert found(calls, results) == ["2", "0", "1", "4", "3"]
    for further in (None, "a", "z"):
        with pytest.raises(ApiError, match="is the result of no call"):
            found(calls, [*results, results[1] | {"tool_name": further}])


def test_items_of_a_responses_history(server: Scripted) -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None, "content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "status": "completed", "id": "m_1"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "now", "input": "UTC"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "12:00"}]},
    ]
    assert answered(server, "/v1/responses", input=items)["output"][0]["content"][0]["text"] == LONG
    (choice,) = read_response({"input": items}).choices
    messages = choice.prompt.messages  # type: ignore[union-attr]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["content"] == "No."


HARMLESS: Any = {
    **{"skip_special_tokens": True, "cache_prompt": False, "return_token_ids": True, "id_slot": -1, "timings_per_token": True},
    **{"return_progress": True, "keep_alive": "5m", "priority": 0, "dry_multiplier": 0.0, "dry_base": 1.75, "mirostat": 0, "n_probs": 0},
    **{"typical_p": 1.0, "top_n_sigma": -1, "samplers": [], "use_beam_search": False, "stop_token_ids": []},
}


@pytest.mark.parametrize("path", [*READ, "/api/chat"])
def test_fields_that_change_no_answer_are_ignored_with_one_line(path: str) -> None:
    with scripted_server(LONG) as server:
        body = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "hi"}}.get(path, {"messages": HI, "stream": False})
        for _ in range(2):
            answered(server, path, **{**body, **HARMLESS})
        assert [note.split("'")[1] for note in server.notes] == [*HARMLESS]


@pytest.mark.parametrize("path", [*READ, "/api/chat"])
@pytest.mark.parametrize(
    "field",
    [
        {"mirostat": 2},
        {"dry_multiplier": 0.8},
        {"stop_token_ids": [5]},
        {"use_beam_search": True},
        {"bad_words": ["x"]},
        {"samplers": ["x"]},
    ],
    ids=str,
)
def test_fields_that_change_the_answer_are_refused_by_name(server: Scripted, path: str, field: Any) -> None:
    body = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "hi"}}.get(path, {"messages": HI})
    status, _, answer = send(server, "POST", path, {**body, **field})
    assert status == 400
    assert next(iter(field)) in str(answer["error"])
    assert "would change the answer" in str(answer["error"])


def test_ollamas_options_are_known_or_refused(server: Scripted) -> None:
    loading = {"num_ctx": 4096, "num_gpu": 1, "num_thread": 2, "use_mmap": True, "mirostat": 0, "tfs_z": 1, "penalize_newline": True}
    assert answered(server, "/api/chat", messages=HI, stream=False, options=loading)["message"]["content"] == LONG
    for option in ({"mirostat": 1}, {"temprature": 1}, {"tfs_z": 0.5}):
        status, _, body = send(server, "POST", "/api/chat", {"messages": HI, "options": option})
        assert (status, f"options.{next(iter(option))}" in body["error"]) == (400, True)


def test_tools_that_are_no_functions_are_left_out() -> None:
    with scripted_server("ok") as server:
        others = [{"type": "web_search"}, {"type": "custom", "custom": {"name": "x"}}]
        for _ in range(2):
            assert text_of(server, tools=[*others, TOOL]) == "ok"
            assert answered(server, "/v1/responses", input="hi", tools=[{"type": "web_search"}, {"type": "function", **FUNCTION}])
        assert [note.split("'")[1] for note in server.notes] == ["web_search", "custom"]
        (choice,) = read_chat({"messages": HI, "tools": [*others, TOOL]}).choices
        assert [tool["function"]["name"] for tool in choice.prompt.tools] == ["now"]  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_those_that_are_offered(mode: str) -> None:
    pytest.importorskip("llguidance", reason="needs edge-mtp[grammar]")
    tools = [{"type": "function", "function": {"name": name}} for name in ("now", "then")]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": "then"}}]}}
    chat = read_chat({"messages": HI, "tools": tools, "tool_choice": choice}).choices[0]
    flat = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "then"}]}
    functions = [{"type": "function", "name": name} for name in ("now", "then")]
    for request in (chat, read_response({"input": "hi", "tools": functions, "tool_choice": flat}).choices[0]):
        assert [tool["function"]["name"] for tool in request.prompt.tools] == ["then"]  # type: ignore[union-attr]
        assert (request.constraint is not None) == (mode == "required")


def test_a_grammar_is_taken_as_llama_server_takes_it() -> None:
    pytest.importorskip("llguidance", reason="needs edge-mtp[grammar]")
    with scripted_server("yes, it is") as server:
        for path, body in ((CHAT, {}), ("/v1/completions", {"prompt": "<|turn>model\n"})):
            answer = answered(server, path, **body, grammar='root ::= "yes"', max_tokens=9)["choices"][0]
            assert (answer.get("message") or {"content": answer.get("text")})["content"] == "yes"
        assert text_of(server, grammar="") == "yes, it is"
        assert text_of(server, json_schema={"const": 7}, max_tokens=9) == "7"
        completion = answered(server, "/v1/completions", prompt="x", json_schema={"const": 7}, max_tokens=9)
        assert completion["choices"][0]["text"] == "7"
        for fields, says in (
            ({"grammar": 'root ::= "x"', "tools": [TOOL]}, "combined with tools"),
            ({"grammar": 'root ::= "x"', "json_schema": {}}, "combined with a JSON schema"),
            ({"grammar": "root ::= ("}, "grammar"),
        ):
            status, _, body = send(server, "POST", CHAT, {"messages": HI, **fields})
            assert (status, says in body["error"]["message"]) == (400, True), body


@pytest.mark.parametrize("drafts", [{}, {"draft_length": 0}])
def test_an_answer_of_an_exact_length(server: Scripted, drafts: Any) -> None:
    for fields, tokens in (({"ignore_eos": True}, 90), ({"min_tokens": 90}, 90), ({"min_tokens": 5}, len(LONG) + 1), ({}, len(LONG) + 1)):
        answer = answered(server, max_tokens=90, **fields, **drafts)
        assert answer["usage"]["completion_tokens"] == tokens
        assert answer["choices"][0]["finish_reason"] == ("length" if tokens == 90 else "stop")
