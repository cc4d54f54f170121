"""Requests that would stop the server or take its memory: predictions, lists without end, numbers beyond the range, costly constraints."""

from __future__ import annotations

import json
import threading
import time
import weakref
from typing import Any

import pytest

from chat_server import CHAT, Held, Scripted, scripted_server, send
from edge_runtime.server import app, streaming
from edge_runtime.server.apis.response_format import Written, encoded
from edge_runtime.server.apis.responses_api import MAX_REPEATED, ResponsesFormat
from edge_runtime.server.engine.prompts import MAX_CHARACTERS
from edge_runtime.server.errors import ApiError
from edge_runtime.server.http import body as http_body
from edge_runtime.server.http.body import MEDIA_BODY, SMALL_BODY, TEXT_BODY, parse_json
from edge_runtime.server.json_text import MAX_VALUES, PIECE, count_values
from edge_runtime.server.requests.completions import MAX_PREDICTED, read_chat, read_completion
from edge_runtime.session.session import Session
from edge_runtime.text.constraints import MAX_SCHEMA_BYTES
from polling import wait

HI = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


def test_a_prediction_is_cut_and_tokenized_in_the_thread_for_prompts() -> None:
    with scripted_server("Hello.", context=256) as server:
        vocabulary = server.vocabulary
        encode, calls = vocabulary.encode, []

        def watched(text: str, **options: Any) -> list[int]:
            if "predicted" in text:
                calls.append((threading.current_thread().name.startswith("edge-mtp prompts"), len(text)))
            return encode(text, **options)

        vocabulary.encode = watched  # type: ignore[method-assign]
        status, _, body = send(
            server, "POST", "/v1/chat/completions", HI | {"prediction": {"type": "content", "content": "predicted " * 400_000}}
        )
        assert (status, body["choices"][0]["message"]["content"]) == (200, "Hello.")
        assert calls == [(True, 16 * 256)]


@pytest.mark.parametrize("parts", [1, 2])
def test_no_more_of_a_prediction_is_kept_than_is_used(parts: int) -> None:
    """One smile makes 15 MB of text 60 MB, for as long as its request waits."""
    text = "\U0001f600" + "a" * (2 * MAX_PREDICTED)
    content = text if parts == 1 else [{"type": "text", "text": text}] * parts
    request = read_chat(HI | {"prediction": {"type": "content", "content": content}})
    assert request.choices[0].prediction == text[:MAX_PREDICTED]


def test_a_response_repeats_no_more_than_its_limit() -> None:
    """21 clients that read no answer filled 2 GB with 15 MB of metadata each, and stopped the event loop for 3.5 seconds."""
    short = {"metadata": {"a": "b"}, "tools": [{"name": "f"}], "temperature": 0.5}
    long = {
        "instructions": "x" * MAX_REPEATED,
        "reasoning": {str(number): None for number in range(MAX_REPEATED // 2)},
        "text": {"verbosity": ["x" * MAX_REPEATED]},
        "user": 1 << MAX_REPEATED,
    }
    created = json.loads(ResponsesFormat("model", short | long).begin(0)[0].partition(b"data: ")[2])["response"]
    assert {name: created[name] for name in (*short, *long)} == short | {
        "instructions": None,
        "reasoning": None,
        "text": {"format": {"type": "text"}},
        "user": None,
    }


def test_ids_are_decoded_in_the_thread_for_prompts_and_count_as_waiting() -> None:
    with scripted_server("Hello.", waiting=0) as server:
        decoded = Held(server.vocabulary, "piece")
        actual: list[Any] = []
        asking = threading.Thread(target=lambda: actual.append(send(server, "POST", "/detokenize", {"tokens": [100 + ord("a")]})))
        asking.start()
        assert decoded.begun.wait(30)
        assert send(server, "GET", "/health")[2]["waiting"] == 1
        assert send(server, "POST", "/detokenize", {"tokens": [2]})[0] == 503
        decoded.going.set()
        asking.join()
        assert (actual[0][0], actual[0][2]["content"], decoded.threads) == (200, "a", {"edge-mtp prompts"})


def test_ids_beyond_the_context_are_refused() -> None:
    with scripted_server("Hello.") as server:
        server.vocabulary.piece = lambda *_, **__: pytest.fail("it was decoded")
        status, _, body = send(server, "POST", "/detokenize", {"tokens": [2] * 2049})
        assert (status, body["error"]["message"]) == (400, "tokens has 2049 items; at most 2048 are allowed")


RENDERED = "{{ raise_exception('it was rendered') }}"


def test_texts_of_tools_are_counted_before_they_are_copied_for_the_template() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": ["a"] * 116_000}}}
    with scripted_server("Hello.", template=RENDERED) as server:
        status, _, body = send(server, "POST", "/v1/chat/completions", HI | {"tools": [tool]})
    assert (status, body["error"]["param"]) == (400, "tools")
    assert "texts; at most 65536 are allowed" in body["error"]["message"]


@pytest.mark.parametrize("name", ["messages", "tools"])
def test_more_text_than_a_template_may_write_is_not_searched(name: str) -> None:
    text = "<" * (MAX_CHARACTERS // 2)
    tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": {text: text}}}
    thoughts = {"role": "assistant", "content": "", "reasoning_content": text}
    fields = {"tools": [tool]} if name == "tools" else {"messages": [thoughts] * 3}
    with scripted_server("Hello.", template=RENDERED) as server:
        status, _, body = send(server, "POST", "/v1/chat/completions", HI | fields)
    assert (status, body["error"]["param"]) == (400, name)
    assert f"characters; at most {MAX_CHARACTERS} are allowed" in body["error"]["message"]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    with scripted_server("Hello.") as server:
        encoded = Held(server.worker._prompts, "encode", lambda prompt: len(str(prompt)) > 50_000)
        long = HI | {"messages": [{"role": "user", "content": "a" * 60_000}]}
        hostile = threading.Thread(target=lambda: send(server, "POST", CHAT, long))
        hostile.start()
        assert encoded.begun.wait(30)
        assert send(server, "POST", CHAT, HI)[0] == 200
        assert hostile.is_alive()
        encoded.going.set()
        hostile.join()


def test_answers_to_one_prompt_encode_it_once() -> None:
    with scripted_server("Hello.", count=2) as server:
        encoded = Held(server.worker._prompts, "encode", lambda _: False)
        assert send(server, "POST", CHAT, HI | {"n": 3})[0] == 200
        assert len(encoded.arguments) == 1


class Kept(dict[str, Any]):
    """A body that a weak reference can watch."""


@pytest.mark.parametrize(("path", "content"), [("/v1/chat/completions", HI), ("/v1/responses", {"input": "hi"}), ("/api/chat", HI)])
def test_a_body_is_dropped_before_the_answer_begins(monkeypatch: pytest.MonkeyPatch, path: str, content: dict[str, Any]) -> None:
    bodies: list[weakref.ref[Kept]] = []

    def watched(data: bytes, *limits: Any) -> Kept:
        body = Kept(parse_json(data, *limits))
        bodies.append(weakref.ref(body))
        return body

    monkeypatch.setattr(app, "parse_json", watched)
    with scripted_server("Hello.") as server:
        alive: list[bool] = []
        server.batch.before_forward = lambda: alive.extend(body() is not None for body in bodies)
        content = {name: value for name, value in content.items() if name != "temperature" or path != "/api/chat"}
        assert send(server, "POST", path, content | {"stream": False})[0] == 200
        assert alive
        assert not any(alive)


def test_large_bodies_are_parsed_in_a_thread_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def watched(data: bytes, *limits: Any) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return parse_json(data, *limits)

    monkeypatch.setattr(app, "parse_json", watched)
    with scripted_server("Hello.") as server:
        for path, content in (("/v1/chat/completions", HI), ("/tokenize", {"content": "a"}), ("/detokenize", {"tokens": [2]})):
            body = json.dumps(content).encode()
            assert send(server, "POST", path, body)[0] == 200
            assert send(server, "POST", path, body + b" " * SMALL_BODY)[0] == 200
    assert [name.startswith("edge-mtp bodies") for name in threads] == [False, True] * 3


def test_memory_of_large_bodies_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 requests with 16 pictures each an idle server kept 280 MB."""
    trims: list[float] = []
    monkeypatch.setattr(http_body, "TRIM_SECONDS", 0.02)
    with scripted_server("Hello.") as server:
        monkeypatch.setattr(http_body, "return_freed_memory", lambda: trims.append(time.monotonic()))
        assert send(server, "POST", CHAT, HI)[0] == 200
        encoded = Held(server.vocabulary, "encode")
        body = json.dumps(HI).encode() + b" " * SMALL_BODY
        asking = threading.Thread(target=lambda: send(server, "POST", CHAT, body))
        asking.start()
        assert encoded.begun.wait(30)
        time.sleep(0.05)  # in which it would be returned
        assert not trims, "its memory is held, and a busy server is left alone"
        encoded.going.set()
        asking.join()
        assert wait(lambda: len(trims) == 1)
        assert send(server, "POST", CHAT, body)[0] == 200
        time.sleep(0.05)
        assert len(trims) == 1, "no more in this minute"


@pytest.mark.parametrize("text", ["\\", '"', ",[{", '\\"', "a\n\\\\", '\\",{', ""])
def test_values_are_counted_outside_of_strings_also_where_a_piece_ends(text: str) -> None:
    """A body is looked through in pieces; `shift` moves the text over the end of the first one."""
    for shift in range(-3, 6):
        filler = "a" * (PIECE - len('{"": "') - shift)
        assert count_values(json.dumps({filler: text, text: [text, {"b": text + text}], "c": ",,"})) == 6


@pytest.mark.parametrize("filler", ["[]", "{}", "1", '"a"', '{"a":[[1]]}', '"\\"[,"', '[",,",[]]'])
def test_bodies_of_very_many_values_are_refused_before_they_are_parsed(filler: str) -> None:
    body = '{"metadata":[' + ",".join([filler] * (MAX_VALUES + 1)) + "]}, and what is no JSON"
    for encoding in ("utf-8", "utf-16"):
        with pytest.raises(ApiError, match=f"the body has more than {MAX_VALUES} JSON values; send fewer"):
            parse_json(body.encode(encoding))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32-le"])
def test_a_body_is_decoded_in_pieces_as_it_is_whole(encoding: str) -> None:
    """`shift` moves the characters over the end of the first piece."""
    for shift in range(8):
        content = {"b" * (PIECE // len("b".encode(encoding)) - 8 - shift): "aé中\U0001f600\ud800", "\udc00": ["\U0001f600" * 3, "é"]}
        assert parse_json(json.dumps(content, ensure_ascii=False).encode(encoding, "surrogatepass")) == content
    for cut in ('{"a": "中"}'.encode(encoding)[:-3], "{}".encode(encoding) + "中".encode(encoding)[:1]):
        with pytest.raises(ApiError, match="the body is not JSON"):
            parse_json(cut)


def test_a_false_string_in_another_encoding_hides_no_values() -> None:
    """The character U+0122 has the byte of a quotation mark."""
    body = '{"a":"\u0122","b":[' + "[]," * MAX_VALUES + "[]]}"
    with pytest.raises(ApiError, match="JSON values"):
        parse_json(body.encode("utf-16-le"))


def test_the_arguments_of_all_calls_together_are_limited() -> None:
    many = json.dumps({"a": [0] * (MAX_VALUES // 4)})
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": many}}
    assert read_chat({"messages": [{"role": "assistant", "tool_calls": [call] * 3}]})
    with pytest.raises(ApiError, match=r"messages\[0\].tool_calls\[3\].function.arguments has more than \d+ JSON values"):
        read_chat({"messages": [{"role": "assistant", "tool_calls": [call] * 4}]})


def test_the_largest_legal_requests_are_read() -> None:
    text = 'lists [1, 2], {braces}, "quotes" and \\ ' * 50
    parts = [{"type": "text", "text": text}] * 2
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"path": "a", "text": text, "lines": [1, 2]})}}
    turns = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call] * 2},
        {"role": "tool", "tool_call_id": "1", "content": parts},
    ]
    field = {"type": "string", "description": text[:80], "enum": ["a", "b", "c"]}
    schema = {"type": "object", "properties": {f"field_{i}": field for i in range(40)}, "required": [f"field_{i}" for i in range(40)]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    data = json.dumps({"messages": (turns * 683)[:2048], "tools": [tool] * 128}).encode()
    assert len(data) < MEDIA_BODY.size
    assert len(read_chat(parse_json(data)).choices) == 1
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    read_chat(parse_json(json.dumps({"messages": [{"role": "user", "content": [picture] * 16}]}).encode()))
    ids = json.dumps({"prompt": [[262_143] * 16_000] * 32}).encode()
    assert len(read_completion(parse_json(ids, TEXT_BODY)).choices) == 32
    item = json.dumps({"prompt": [262_143] * 262_143}).encode()
    assert len(read_completion(parse_json(item, TEXT_BODY)).choices) == 1
    read_completion(parse_json(json.dumps({"prompt": text * 1000}).encode(), TEXT_BODY))


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_cannot_state_again_are_refused(number: str) -> None:
    with pytest.raises(ApiError, match=f"the body is not JSON \\({number} is "):
        parse_json(f'{{"input": "hi", "metadata": {{"a": {number}}}}}'.encode())
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": f'{{"a": {number}}}'}}
    with pytest.raises(ApiError, match=f"function.arguments is not JSON \\({number} is "):
        read_chat({"messages": [{"role": "assistant", "tool_calls": [call]}]})


def test_numbers_in_range_are_read() -> None:
    assert parse_json(b'{"a": [1e308, -1E-400, 0.5, -0.0, 12345678901234567890]}') == {"a": [1e308, 0.0, 0.5, 0.0, 12345678901234567890]}


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/api/chat"])
def test_log_probabilities_are_written_as_they_come(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Those of a long answer at its end stopped the event loop for 1.5 seconds."""
    request = {
        CHAT: HI | {"logprobs": True, "top_logprobs": 3},
        "/v1/responses": {"input": "hi", "top_logprobs": 3, "include": ["message.output_text.logprobs"], "temperature": 0},
        "/api/chat": {"messages": HI["messages"], "logprobs": True, "top_logprobs": 3, "stream": False, "options": {"temperature": 0}},
    }[path]
    written: list[int] = []
    dumps = json.dumps
    monkeypatch.setattr(json, "dumps", lambda value, **options: (text := dumps(value, **options), written.append(len(text)))[0])
    with scripted_server("Hello, you there." * 8) as server:
        written.clear()
        status, _, body = send(server, "POST", path, request)
        assert status == 200
        assert dumps(body).count('"logprob"') > 100
        assert max(written) < 2500
        monkeypatch.setattr(streaming, "MAX_LOGPROBS", 100)
        status, _, body = send(server, "POST", path, request)
        assert (status, "log probabilities; stream it, or ask for fewer" in dumps(body)) == (400, True)


def test_too_many_log_probabilities_are_refused_before_the_work() -> None:
    """A request was refused after minutes of tokens, which all were in vain."""
    ask = HI | {"logprobs": True, "top_logprobs": 20, "n": 4}
    for legal in ({}, {"max_tokens": 10}, {"max_tokens": 2048, "stream": True}):
        streaming.check_logprobs(read_chat(ask | legal), 2048)
    streaming.check_logprobs(read_chat(ask | {"max_tokens": 1 << 20}), 256)  # no answer is longer than the context
    with scripted_server("Hi.") as server:
        status, _, body = send(server, "POST", CHAT, ask | {"max_tokens": 2048})
        assert server.batch.targets[0].rows == [], "it was not begun"
    message = "the answer may have 172032 log probabilities, more than 131072; stream it, or ask for fewer tokens or alternatives"
    assert (status, body["error"]["message"]) == (400, message)


def test_log_probabilities_of_a_completion_have_their_offsets() -> None:
    with scripted_server("aéc") as server:
        prompt = send(server, "POST", "/tokenize", {"messages": HI["messages"]})[2]["tokens"]
        status, _, body = send(server, "POST", "/v1/completions", {"prompt": prompt, "logprobs": 1, "temperature": 0})
    logprobs = body["choices"][0]["logprobs"]
    assert (status, logprobs["tokens"]) == (200, ["a", "\ufffd", "\ufffd", "c"])
    assert [[*top] for top in logprobs["top_logprobs"]] == [[token] for token in logprobs["tokens"]]
    assert logprobs["token_logprobs"] == pytest.approx([0.0] * 4, abs=1e-6)
    assert logprobs["text_offset"] == [0, 1, 2, 3]


def test_written_json_is_taken_over_in_its_place() -> None:
    value = {"a": Written("[1, 2]"), "b": ['"', "\x00", "é\ud800"], "c": {"d": Written('"é"'), "e": [Written("{}")] * 2}}
    assert json.loads(encoded(value)) == {"a": [1, 2], "b": ['"', "\x00", "é?"], "c": {"d": "é", "e": [{}, {}]}}


WAIT_S = 60.0


def ask(server: Scripted, schema: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    fields: dict[str, Any] = HI | {"max_tokens": 8}
    if schema is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    status, _, body = send(server, "POST", CHAT, fields)
    return status, body


def test_others_are_served_while_a_constraint_is_compiled(monkeypatch):
    """The compilation ends only when the others were served."""
    pytest.importorskip("llguidance", reason="needs edge-mtp[grammar]")
    served = threading.Event()
    compile_constraint = Session.compile_constraint

    def slow(self: Session, constraint: Any) -> Any:
        assert constraint is None or served.wait(WAIT_S)
        return compile_constraint(self, constraint)

    monkeypatch.setattr(Session, "compile_constraint", slow)
    answers: list[tuple[int, dict[str, Any]]] = []
    with scripted_server("hello there") as server:
        hostile = threading.Thread(target=lambda: answers.append(ask(server, {"type": "string", "maxLength": 10**9})))
        hostile.start()
        assert [ask(server)[0] for _ in range(3)] == [200, 200, 200]
        served.set()
        hostile.join()
    assert answers[0][0] == 200


def test_a_schema_may_be_a_megabyte_and_no_more() -> None:
    pytest.importorskip("llguidance", reason="needs edge-mtp[grammar]")
    schema: dict[str, Any] = {"const": 1, "description": ""}
    rest = MAX_SCHEMA_BYTES - len(json.dumps(schema))
    with scripted_server("hello there") as server:
        assert ask(server, schema | {"description": "a" * rest})[0] == 200
        status, body = ask(server, schema | {"description": "a" * (rest + 1)})
    message = f"the JSON schema has {MAX_SCHEMA_BYTES + 1} bytes; at most {MAX_SCHEMA_BYTES} are allowed"
    assert (status, body["error"]["message"]) == (400, message)
