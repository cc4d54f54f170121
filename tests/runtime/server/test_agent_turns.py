"""Turns of a coding agent: each token of its conversation is computed once, whoever else asks meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

from chat_server import send
from edge_runtime.session.generation import PREFILL_ROWS

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
