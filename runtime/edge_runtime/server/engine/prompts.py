"""Turns prompts into token ids, with limits on what is tokenized. Any thread may use it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from edge_devices.children import ChildBudget
from edge_runtime.drafting.sources import predicted_tokens
from edge_runtime.errors import RequestError
from edge_runtime.media.soft_rows import MEDIA, Media, MediaPrompt, without_media
from edge_runtime.server.errors import CONTEXT_EXCEEDED, ApiError, invalid
from edge_runtime.server.json_text import values_of
from edge_runtime.server.requests.completions import Prompt
from edge_runtime.server.requests.messages import Conversation, SentMedia
from edge_runtime.session.session import Session
from edge_runtime.text.chat_template import MARK, ChatTemplate

# In bytes. The size of a longer text is checked before it is tokenized, because tokenizing 2 MB takes seconds.
_SURELY_FAST = 1 << 16
# The most texts of a conversation, and of its tools. Each is copied under the interpreter lock, before the template's own limits apply.
MAX_TEXTS = 1 << 16
# The most characters of these texts: as many as a template may write.
MAX_CHARACTERS = 1 << 22
# Encoding a prompt below these numbers of characters and JSON values takes some hundredths of a second at most.
_SHORT_CHARACTERS, _SHORT_VALUES = 1 << 15, 1 << 10


def media_of(prompt: Prompt) -> list[SentMedia]:
    """Returns the images and sound of a prompt, in order."""
    messages = prompt.messages if isinstance(prompt, Conversation) else ()
    return [media for message in messages for media in message.get(MEDIA, ())]


def is_short(prompt: Prompt, prediction: str) -> bool:
    """Whether encoding a prompt and its prediction is so quick that other short prompts may wait for it."""
    if not isinstance(prompt, Conversation):
        return len(prompt) + len(prediction) <= _SHORT_CHARACTERS
    left = _SHORT_CHARACTERS - len(prediction)
    for values, value in enumerate(values_of([prompt.messages, prompt.tools])):
        left -= len(value) if isinstance(value, str) else 0
        if values >= _SHORT_VALUES or left < 0:
            return False
    return left >= 0


def _check_values(conversation: Conversation) -> None:
    for name, part in (("messages", conversation.messages), ("tools", conversation.tools)):
        texts = [len(value) for value in values_of([part]) if isinstance(value, str)]
        if len(texts) > MAX_TEXTS:
            raise invalid(f"{name} has {len(texts)} texts; at most {MAX_TEXTS} are allowed", name)
        if sum(texts) > MAX_CHARACTERS:
            raise invalid(f"{name} has texts of {sum(texts)} characters; at most {MAX_CHARACTERS} are allowed", name)


class Prompts:
    """Encodes prompts for sessions like `session`."""

    def __init__(self, session: Session, template: ChatTemplate) -> None:
        self._session = session
        self._vocabulary = session.vocabulary
        self._size = session.bundle.manifest.architecture.vocab_size
        self._context = session.target.context
        self._template = template

    def with_media(self, ids: Sequence[int], media: Sequence[Media], client: int) -> MediaPrompt:
        """Returns the `ids` of `encode` with the soft rows of the conversation's media. These are cached for this client alone."""
        encoded = self._session.media_prompt(ids, media, client)
        if len(encoded.ids) >= self._context:
            raise self._too_long(len(encoded.ids))
        return encoded

    def encode(self, prompt: Prompt, *, special: bool = True) -> list[int]:
        """Returns the prompt's token ids, with one id for each image or sound. Raises RequestError or ApiError if they do not fit.

        Unless `special`, the beginning-of-sequence token is left out.
        """
        ids = self._ids(prompt)
        if not special and ids[:1] == [self._vocabulary.bos]:
            ids = ids[1:]
        if len(ids) >= self._context:
            raise self._too_long(len(ids))
        return ids

    def count(self, prompt: Prompt, client: int, children: ChildBudget) -> int:
        """Counts a prompt's tokens, including the rows of its images and sound, even if they do not fit. Raises as `encode` does."""
        ids, media = self._ids(prompt), media_of(prompt)
        if not media:
            return len(ids)
        self._session.check_media()
        return len(self._session.media_prompt(ids, [sent.decoded(children) for sent in media], client).ids)

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, Conversation):
            _check_values(prompt)
            self._check_size(sum(len(str(message.get("content", "")).strip().encode("utf-8", "replace")) for message in prompt.messages))
            messages, _ = without_media(prompt.messages)
            begun = str(messages.pop()["content"]) if prompt.continues else ""
            text = self._template.render(
                messages, tools=prompt.tools, thinking=prompt.thinking, begun=begun, generation_prompt=prompt.generation_prompt
            )
            # Of tools, calls and thoughts, only what the template writes counts.
            self._check_size(len(text.replace(MARK, "").encode("utf-8", "replace")))
            ids = self._template.encode_rendered(text)
        elif isinstance(prompt, str):
            self._check_size(len(prompt.encode("utf-8", "replace")))
            ids = self._vocabulary.encode(prompt)
        else:
            ids = list(prompt)
        self._check_ids(ids)
        return ids

    def predicted(self, text: str) -> list[int]:
        """Returns the tokens of a prediction, at most as many as the context holds."""
        return predicted_tokens(text, self._vocabulary, self._context)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, control tokens included. Raises RequestError for ids outside the vocabulary."""
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
            raise self._too_long(size // self._longest_piece, "at least ")

    def _too_long(self, tokens: int, least: str = "") -> ApiError:
        """Returns the error in the wording that clients recognize. They then drop old messages or choose another model."""
        exceeds = f"the prompt has {least}{tokens} tokens, which exceeds the available context size"
        limit = f"this model's maximum context length is {self._context} tokens, for prompt and answer together"
        return ApiError(
            400,
            f"{exceeds}: {limit}; shorten it, or start the server with a larger --context",
            code=CONTEXT_EXCEEDED,
            numbers={"n_prompt_tokens": tokens, "n_ctx": self._context},
        )
