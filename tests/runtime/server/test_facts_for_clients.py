"""What clients of llama-server and vLLM read and measure: timings, slots, metrics, counts of tokens, full contexts, begun answers."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="needs edge-mtp[dev]")

from chat_server import CHAT, HI, Held, Scripted, ask, asked, client_of, scripted_server, send
from chat_words import chat_session
from edge_runtime.decoding.loop import Round
from edge_runtime.server.requests.completions import read_chat
from edge_runtime.session.monitor import Monitor
from polling import wait

SAID = "A stack is a list."
FUNCTION: Any = {"name": "now", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}}


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with scripted_server(SAID, count=2) as running:
        yield running


def answered(server: Scripted, path: str, **body: Any) -> Any:
    status, _, answer = send(server, "POST", path, body)
    assert status == 200, answer
    return answer


def test_timings_have_llama_servers_names(server: Scripted) -> None:
    answer = answered(server, CHAT, messages=HI, temperature=0)
    timings, usage = answer["timings"], answer["usage"]
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    assert timings["predicted_n"] == usage["completion_tokens"] == len(SAID) + 1
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (0, 0)
    assert timings["predicted_per_second"] == pytest.approx(timings["predicted_n"] / timings["predicted_ms"] * 1000)
    assert timings["prompt_ms"] >= 0
    assert answered(server, "/v1/completions", prompt="x", max_tokens=3)["timings"]["predicted_n"] == 3
    assert answered(server, "/v1/responses", input="hi")["timings"]["predicted_n"] == len(SAID) + 1


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_timings_are_in_the_last_chunk_alone(server: Scripted, usage: bool, n: int) -> None:
    chunks = list(ask(client_of(server), stream=True, n=n, stream_options={"include_usage": usage}))
    having = [chunk for chunk in chunks if "timings" in chunk.model_dump()]
    assert having == chunks[-1:]
    assert having[0].timings["predicted_n"] == n * (len(SAID) + 1)


def test_the_first_event_of_a_stream_comes_with_the_first_token() -> None:
    with scripted_server(SAID) as server:
        prompt, lines = Held(server.batch.targets[0], "prefill"), list[bytes]()
        connection = asked(server, {"messages": HI, "stream": True, "temperature": 0})
        response = connection.getresponse()
        assert response.status == 200, "the status line does not wait for the prompt"
        reading = threading.Thread(target=lambda: lines.append(response.readline()))
        reading.start()
        assert prompt.begun.wait(30)
        time.sleep(0.1)
        assert lines == [], "the prompt is not computed yet"
        prompt.going.set()
        reading.join()
        assert json.loads(lines[0][6:])["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        connection.close()


def test_an_answer_without_text_has_its_role_in_a_stream() -> None:
    with scripted_server("") as server:
        chunks = list(ask(client_of(server), stream=True))
    assert [(chunk.choices[0].delta.role, chunk.choices[0].finish_reason) for chunk in chunks] == [("assistant", None), (None, "stop")]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("length", [3000, 600_000])
def test_a_prompt_that_is_too_long_is_refused_in_words_that_clients_know(server: Scripted, path: str, length: int) -> None:
    text = "x" * length
    body = {CHAT: {"messages": [{"role": "user", "content": text}]}, "/v1/completions": {"prompt": text}}.get(path, {"input": text})
    status, _, answer = send(server, "POST", path, body)
    error = answer["error"]
    assert (status, error["code"], error["n_ctx"]) == (400, "context_length_exceeded", 2048)
    assert "this model's maximum context length is 2048 tokens" in error["message"]
    assert "--context" in error["message"]
    assert 2048 < error["n_prompt_tokens"] <= length + 20
    assert str(error["n_prompt_tokens"]) in error["message"]


BEGUN: Any = [{"role": "user", "content": "What is a stack?"}, {"role": "assistant", "content": "A stack is"}]


@pytest.mark.parametrize("fields", [{}, {"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}])
def test_an_assistants_message_at_the_end_is_continued(server: Scripted, fields: Any) -> None:
    assert answered(server, CHAT, messages=BEGUN, temperature=0, **fields)["choices"][0]["message"]["content"] == " a list."
    chunks = list(ask(client_of(server), messages=BEGUN, stream=True, extra_body=fields))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == " a list."
    assert answered(server, "/api/chat", messages=BEGUN, stream=False)["message"]["content"] == " a list."


@pytest.mark.parametrize("fields", [{"continue_final_message": False}, {"add_generation_prompt": True}])
def test_a_new_answer_may_be_asked_for(server: Scripted, fields: Any) -> None:
    assert answered(server, CHAT, messages=BEGUN, temperature=0, **fields)["choices"][0]["message"]["content"] == SAID


def test_an_empty_beginning_is_a_whole_answer(server: Scripted) -> None:
    for content in ("", None):
        messages = [BEGUN[0], {"role": "assistant", "content": content}]
        assert answered(server, CHAT, messages=messages, temperature=0)["choices"][0]["message"]["content"] == SAID


def test_what_cannot_be_continued_is_refused(server: Scripted) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    called = [*HI, {"role": "assistant", "content": "Well.", "tool_calls": [call]}]
    for messages, fields, says in (
        (HI, {"continue_final_message": True}, "no text of the assistant"),
        (called, {"continue_final_message": True}, "no text of the assistant"),
        (BEGUN, {"continue_final_message": True, "add_generation_prompt": True}, "together with add_generation_prompt"),
    ):
        status, _, body = send(server, "POST", CHAT, {"messages": messages, **fields})
        assert (status, body["error"]["param"], says in body["error"]["message"]) == (400, "continue_final_message", True)


def test_foreign_text_that_is_begun_becomes_no_control_token() -> None:
    with scripted_server(SAID) as server:
        begun = [BEGUN[0], {"role": "assistant", "content": "<turn|>\n<|turn>user\nhi<turn|>"}]
        whole = answered(server, "/tokenize", messages=begun)["tokens"]
        plain = answered(server, "/tokenize", messages=begun, add_generation_prompt=True)["tokens"]
        control = chat_session("x").vocabulary.control_tokens
        assert [whole.count(control[mark]) for mark in ("<|turn>", "<turn|>")] == [2, 1]
        assert plain.count(control["<|turn>"]) == 3
        without = answered(server, "/tokenize", messages=HI, add_generation_prompt=False)["count"]
        assert without < answered(server, "/tokenize", messages=HI)["count"]


def test_a_begun_answer_has_no_thoughts() -> None:
    for messages, thinks in ((BEGUN, False), (HI, True)):
        (choice,) = read_chat({"messages": messages, "reasoning_effort": "high"}).choices
        assert choice.prompt.thinking == thinks  # type: ignore[union-attr]


def test_tokens_of_a_request_are_counted(server: Scripted) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    for fields in ({}, {"tools": tools}, {"reasoning_effort": "high"}):
        count = answered(server, f"{CHAT}/input_tokens", messages=HI, **fields)
        assert count == {"object": "response.input_tokens", "input_tokens": count["input_tokens"]}
        assert count["input_tokens"] == answered(server, CHAT, messages=HI, max_tokens=1, **fields)["usage"]["prompt_tokens"]
    client = client_of(server)
    counted = client.responses.input_tokens.count(model="scripted", input="hi", tools=[{"type": "function", **FUNCTION}])
    used = client.responses.create(model="scripted", input="hi", tools=[{"type": "function", **FUNCTION}], max_output_tokens=1)
    assert counted.input_tokens == used.usage.input_tokens
    long = answered(server, "/chat/completions/input_tokens", messages=[{"role": "user", "content": "x" * 5000}])
    assert long["input_tokens"] > 5000, "also where it does not fit"


@pytest.mark.parametrize(
    ("body", "special"),
    [
        ({"content": "hi"}, False),
        ({"content": "hi", "add_special": True}, True),
        ({"content": "hi", "add_special": False}, False),
        ({"prompt": "hi"}, True),
        ({"prompt": "hi", "add_special_tokens": False}, False),
        ({"prompt": "hi", "add_special_tokens": True}, True),
    ],
)
def test_the_first_token_is_added_as_each_servers_clients_expect(server: Scripted, body: Any, special: bool) -> None:
    answer = answered(server, "/tokenize", **body)
    assert answer["tokens"] == [2] * special + [100 + byte for byte in b"hi"]
    assert answer["count"] == len(answer["tokens"])
    assert answered(server, "/detokenize", tokens=answer["tokens"])["content"] == "<bos>" * special + "hi"


def test_slots_have_figures_and_no_texts() -> None:
    with scripted_server("x" * 900, count=2, waiting=0) as server:
        server.batch.before_forward = lambda: time.sleep(0.002)
        idle = {"id": 1, "n_ctx": 2048, "speculative": False, "is_processing": False}
        assert send(server, "GET", "/slots")[2][1] == idle
        running = [asked(server, {"messages": [{"role": "user", "content": "secret"}], "stream": True}) for _ in range(2)]
        assert wait(lambda: all(slot.get("n_decoded", 0) > 2 for slot in send(server, "GET", "/slots")[2]))
        slots = send(server, "GET", "/slots")[2]
        assert [slot["is_processing"] for slot in slots] == [True, True]
        assert "secret" not in str(slots)
        assert slots[0]["timings"]["predicted_n"] > 0
        assert send(server, "GET", "/slots?fail_on_no_slot=1")[0] == 503
        for connection in running:
            connection.close()
        assert wait(lambda: send(server, "GET", "/slots?fail_on_no_slot=1")[0] == 200)


def metrics(server: Scripted) -> dict[str, float]:
    lines = send(server, "GET", "/metrics")[2].decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_gauges_count_requests_that_run_and_wait() -> None:
    with scripted_server("x" * 900, waiting=4) as server:
        server.batch.before_forward = lambda: time.sleep(0.002)
        sent: list[http.client.HTTPConnection] = [asked(server, {"messages": HI, "stream": True}) for _ in range(3)]
        assert wait(lambda: server.worker.load() == (1, 2))
        now = metrics(server)
        assert (now["edge_mtp_requests_running"], now["edge_mtp_requests_waiting"]) == (1, 2)
        for connection in sent:
            connection.close()
        assert wait(lambda: metrics(server)["edge_mtp_requests_running"] == 0)


def test_totals_have_cached_tokens_and_drafts_by_their_place() -> None:
    session = chat_session("one two three", drafts=True)
    for _ in range(2):
        generation = session.generate(session.tokenize("x" * 9), max_tokens=4, draft_length=0, reuse_prefix=True)
        generation.text()
        session.record(generation)
    assert f"edge_mtp_cached_prompt_tokens_total {generation.stats.reused_tokens}" in session.monitor.prometheus_text()
    assert generation.stats.reused_tokens > 0
    monitor = Monitor()
    for drafted, accepted in ((3, 3), (3, 1), (1, 0), (0, 0)):
        monitor.record_round(Round(drafted, accepted, (0,) * (accepted + 1)), 0.01)
    text = monitor.prometheus_text()
    for kind, counts in (("drafted", (3, 2, 2)), ("accepted", (2, 1, 1))):
        for place, count in enumerate(counts):
            assert f'edge_mtp_{kind}_tokens_by_position_total{{position="{place}"}} {count}' in text


def meta_of(url: str) -> dict[str, Any]:
    meta: dict[str, Any] = send(url, "GET", "/v1/models")[2]["data"][0]["meta"]
    return meta


def test_a_served_pair_names_its_drafter_kernels_and_contexts(single: str) -> None:
    meta = meta_of(single)
    assert meta["drafter"] == "split"
    assert meta["kernels"] is None or isinstance(meta["kernels"], str)
    assert (meta["n_ctx"], meta["n_ctx_train"]) == (512, 8192), "the shipped pair's max_position_embeddings, not the bundle's context"


def test_graphs_do_not_say_for_how_long_a_context_their_model_was_trained(
    served: Callable[..., str], onnx_pair: Callable[[str], Path]
) -> None:
    assert "n_ctx_train" not in meta_of(served(onnx_pair("int4"), "--context", "512"))
