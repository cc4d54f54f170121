"""Prompts to token ids, with limits on what is tokenized. Used by one thread at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from edge_runtime.errors import RequestError
from edge_runtime.server.errors import ApiError
from edge_runtime.server.requests.completions import Prompt
from edge_runtime.server.requests.messages import Conversation
from edge_runtime.session.session import Session
from edge_runtime.text.chat_template import MARK, ChatTemplate

# Longer texts are measured before they are tokenized: 2 MB take seconds.
_SURELY_FAST = 1 << 16


class Prompts:
    """Encodes prompts for sessions like `session`."""

    def __init__(self, session: Session, template: ChatTemplate) -> None:
        self._vocabulary = session.vocabulary
        self._size = session.bundle.manifest.architecture.vocab_size
        self._context = session.target.context
        self._template = template

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns the prompt's token ids. Raises RequestError or ApiError if they do not fit."""
        if isinstance(prompt, Conversation):
            self._check_size(sum(len(str(message.get("content", "")).strip().encode("utf-8", "replace")) for message in prompt.messages))
            text = self._template.render(prompt.messages, tools=prompt.tools, thinking=prompt.thinking)
            # Tools, calls and thoughts count as far as the template writes them.
            self._check_size(len(text.replace(MARK, "").encode("utf-8", "replace")))
            ids = self._template.encode_rendered(text)
        elif isinstance(prompt, str):
            self._check_size(len(prompt.encode("utf-8", "replace")))
            ids = self._vocabulary.encode(prompt)
        else:
            ids = list(prompt)
        self._check_ids(ids)
        if len(ids) >= self._context:
            raise self._too_long(f"{len(ids)}")
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, control tokens included. Raises RequestError for ids that are not in the vocabulary."""
        self._check_ids(tokens)
        return b"".join(self._vocabulary.piece(token, special=True) for token in tokens).decode("utf-8", "replace")

    def _check_ids(self, ids: Sequence[int]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self._size:
            raise RequestError(f"the prompt has a token id outside 0..{self._size - 1}; check the ids")

    @cached_property
    def _longest_piece(self) -> int:
        return max(len(self._vocabulary.piece(token, special=True)) for token in range(self._size))

    def _check_size(self, size: int) -> None:
        """Refuses a text of `size` bytes that is too long even if it were made of the longest tokens."""
        if size > _SURELY_FAST and size >= self._context * self._longest_piece:
            raise self._too_long(f"at least {size // self._longest_piece}")

    def _too_long(self, tokens: str) -> ApiError:
        return ApiError(
            400,
            f"the prompt has {tokens} tokens, but prompt and answer share a context of {self._context}; shorten it",
            code="context_length_exceeded",
        )
