"""POST /tokenize and /detokenize, with the field names of llama-server and of vLLM."""

from __future__ import annotations

from typing import Any

from edge_runtime.server.errors import invalid
from edge_runtime.server.requests.completions import Prompt
from edge_runtime.server.requests.fields import Fields
from edge_runtime.server.requests.messages import Conversation, read_messages, read_tools


def read_tokenize(body: dict[str, Any]) -> Prompt:
    """Reads a text (`content` or `prompt`), or `messages` to which the chat template is applied. Raises ApiError."""
    fields = Fields(body)
    fields.only({"add_special", "content", "messages", "model", "prompt", "tools"})
    if "messages" in fields:
        return Conversation(messages=read_messages(fields), tools=read_tools(fields))
    text = fields.text("content" if "content" in fields else "prompt")
    if text is None:
        raise invalid("content is missing; send a text as content, or messages", "content")
    return text


def read_detokenize(body: dict[str, Any], most: int) -> list[int]:
    """Reads at most `most` token ids. Raises ApiError."""
    fields = Fields(body)
    fields.only({"model", "tokens"})
    tokens = fields.items("tokens", most)
    if not all(type(token) is int for token in tokens):
        raise fields.wrong("tokens", "must be a list of token ids")
    return list(tokens)
