"""The command on the reference pair: answers, seeds, several at once, leaving, metrics, signals, turns of a coding agent."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="needs edge-mtp[dev]")
pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

from chat_server import Child, client_of, send
from edge_runtime.session.generation import PREFILL_ROWS
from edge_runtime.session.open import open_session

PROMPTS = ["class Stack:\n    def push(", "def add(a, b):\n    return", "import os\n\nfor name in os.", "# The quick brown"]


def complete(client: Any, prompt: str, **fields: Any) -> Any:
    return client.completions.create(**{"model": "any", "prompt": prompt, "max_tokens": 48, "temperature": 0, **fields})


def chat(client: Any, text: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(**{"model": "any", "messages": messages, "max_tokens": 48, "temperature": 0, **fields})


def test_completions_are_what_a_session_says(several: str, exported_pair: Path) -> None:
    with open_session(exported_pair, context=512, drafter="split", check="none") as session:
        generation = session.generate(PROMPTS[0], max_tokens=48)
        expected = generation.text()
    answer = complete(client_of(several), PROMPTS[0])
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == ("text_completion", expected, "length")
    assert answer.usage.completion_tokens == 48
    assert answer.usage.drafted_tokens >= answer.usage.accepted_tokens > 0
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == answer.usage.drafted_tokens
    ids = complete(client_of(several), generation.prompt)
    assert ids.choices[0].text == expected, "token ids are a prompt too"
    chunks = list(complete(client_of(several), PROMPTS[0], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert len(chunks) > 5
    stop = expected[10:13]
    stopped = complete(client_of(several), PROMPTS[0], stop=stop)
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (expected[: expected.index(stop)], "stop")


@pytest.mark.parametrize("server", ["deterministic", "exact"])
def test_deterministic_answers_depend_on_their_request_alone(server: str, request: pytest.FixtureRequest) -> None:
    client = client_of(request.getfixturevalue(server))
    asked = [(prompt, fields) for prompt in PROMPTS for fields in ({}, {"temperature": 0.9, "seed": 7})]

    def answered(item: tuple[str, dict[str, Any]]) -> str:
        text: str = complete(client, item[0], max_tokens=24, **item[1]).choices[0].text
        return text

    alone = [answered(item) for item in asked]
    order = random.Random(1).sample(range(len(asked)), len(asked)) * 2
    with ThreadPoolExecutor(16) as pool:
        batch = list(pool.map(lambda number: answered(asked[number]), order))
    assert batch == [alone[number] for number in order]
    for _ in range(2):  # nor does what is reported reveal what others sent
        assert chat(client, "def area(r):", max_tokens=2).usage.prompt_tokens_details.cached_tokens == 0


def test_metrics_are_prometheus_text(several: str) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="needs edge-mtp[dev]")

    def totals() -> dict[str, float]:
        families = parser.text_string_to_metric_families(send(several, "GET", "/metrics")[2].decode())
        return {sample.name: sample.value for family in families for sample in family.samples}

    before = totals()
    answer = complete(client_of(several), PROMPTS[3])
    after = totals()
    for name, count in {
        "requests": 1,
        "tokens": 48,
        "drafted_tokens": answer.usage.drafted_tokens,
        "prompt_tokens": answer.usage.prompt_tokens,
    }.items():
        assert after[f"edge_mtp_{name}_total"] - before.get(f"edge_mtp_{name}_total", 0) == count


def test_a_signal_ends_it_while_it_answers(exported_pair: Path, probe_memory: Path) -> None:
    child = Child(exported_pair, "--context", "512", "--drafter", "none", "--api-key", "k")
    received: list[str] = []

    def listen() -> None:
        client = client_of(child.url, "k")
        try:
            for prompt in PROMPTS * 100:
                received.extend(chunk.choices[0].text for chunk in complete(client, prompt, max_tokens=400, stream=True))
        except openai.APIError as error:
            received.append(str(error))

    listener = threading.Thread(target=listen)
    listener.start()
    while not received:
        time.sleep(0.01)
    assert child.end(signal.SIGINT) == 0
    listener.join()
    assert "shutting down" in received[-1] or "onnection" in received[-1]
    assert child.lines[-1] == "stopped\n"


def test_a_fingerprint_stands_for_what_computes(several: str, single: str) -> None:
    marks = {
        url: {complete(client_of(url), prompt, max_tokens=2).system_fingerprint for prompt in PROMPTS[:2]} for url in (several, single)
    }
    assert all(len(result) == 1 for result in marks.values())
    assert marks[several] != marks[single]
    streamed = chat(client_of(single), "hi", max_tokens=2, stream=True)
    assert {chunk.system_fingerprint for chunk in streamed} == marks[single]


TURNS = 10
RULES = " ".join(f"Rule {number}: read the file before you change line {number * 7}." for number in range(60))


def asked(url: str, system: str, messages: list[Any], turn: int) -> tuple[int, int, str]:
    """Sends a turn as Claude Code does; returns the tokens of its prompt, how many were computed, and the answer."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.197.{turn:03x}; cc_entrypoint=cli; cch={turn * 7919 % 65536:04x};"
    blocks = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in (billing, system)]
    body = {"model": "m", "max_tokens": 12, "temperature": 0, "system": blocks, "messages": messages}
    status, _, answer = send(url, "POST", "/v1/messages", body)
    assert status == 200, answer
    usage = answer["usage"]
    text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
    return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["input_tokens"], text


def test_each_token_of_a_conversation_is_computed_once(served: Callable[..., str], quantized_pair: Path) -> None:
    """One session serves two conversations in turn; the rows of the one that does not run come from the prompt cache."""
    url = served(quantized_pair, "--context", "8192")
    messages: list[Any] = []
    prompt = total = 0
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Look at part {turn} of the program, and say what it does."})
        prompt, computed, text = asked(url, RULES, messages, turn)
        total += computed
        messages.append({"role": "assistant", "content": text or "Done."})
        asked(url, "You give names to things.", [{"role": "user", "content": f"Name thing {turn}."}], turn)
    assert prompt > 1024 + TURNS * 20
    assert total <= prompt + TURNS, "the last token of a prompt is computed each time"


def test_a_new_conversation_begins_with_the_system_prompt_of_others(served: Callable[..., str], quantized_pair: Path) -> None:
    url = served(quantized_pair, "--context", "8192")
    for turn, words in enumerate(("Write a test.", "Explain this.", "Rename it.")):
        prompt, computed, _ = asked(url, f"Be brief. {RULES}", [{"role": "user", "content": words}], turn)
        if turn:
            assert computed <= prompt % PREFILL_ROWS, "all whole pieces were there"
