"""Turns messages into token ids with the bundle's chat template.

Foreign text (everything in messages and tools) never becomes a control token. The rendered text alone does not show whether <|turn> is
part of a message or a token of the template, and llama.cpp parses some control tokens even in plain text (those that it shows in output,
such as <|channel>). Therefore a mark is inserted into each control token that foreign text spells out, and the pieces between the marks
are tokenized separately.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edge_devices.errors import errors_as
from edge_runtime.bundle.bundle import Bundle, read_part
from edge_runtime.errors import BundleError, RequestError
from edge_runtime.interfaces import Vocabulary
from edge_runtime.text.template_renderer import Renderer, TemplateError

Message = dict[str, Any]

ROLE = "chat_template"
MAX_TEMPLATE_BYTES = 1 << 20
MAX_NESTING = 64
# A noncharacter: Unicode reserves it for internal use.
MARK = "\ufdd0"
# How many characters are searched at a time. A search holds the interpreter lock.
_SLICE = 1 << 13
TURN_TOKENS = ("<|turn>", "<turn|>")
# Template variables for the special tokens of a Gemma tokenizer, except bos_token and eos_token.
_SPECIAL_TOKENS = {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
# Names for a message's thoughts; the first one that is present counts.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# The family of a model whose size is none of the released ones (SIZES in the exporter). It may not be instruction-tuned.
_UNKNOWN_FAMILY = "custom"
# For bundles without a template. The first writes Gemma 4's turns, the second needs no control token.
TURNS_TEMPLATE = """{{ bos_token }}
{%- if enable_thinking and (not messages or messages[0].role != 'system') %}{{ '<|turn>system\n<|think|><turn|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\n' }}
{{- '<|think|>\n' if enable_thinking and loop.first and message.role == 'system' }}
{{- message.content | trim }}{{ '<turn|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"""
PLAIN_TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
{{- {'system': '', 'user': 'User: ', 'assistant': 'Assistant: '}[message.role] ~ message.content | trim ~ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
PLAIN_STOPS = ("\nUser:",)


class ChatTemplate:
    """A compiled template and its vocabulary. `stop` has strings that end an answer, for templates without control tokens.

    Raises BundleError for a template that does not compile; `name` is its name in error messages.
    """

    def __init__(self, source: str, vocabulary: Vocabulary, *, name: str = "the chat template", stop: Sequence[str] = ()) -> None:
        self.stop = tuple(stop)
        self.name = name
        self._vocabulary = vocabulary
        self._foreign = _ForeignText([text for text in vocabulary.control_tokens if len(text) > 1])
        with errors_as(BundleError, f"{name} does not compile", "export the bundle again with a template that does", TemplateError):
            self._renderer = Renderer(source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool = False,
        begun: str = "",
        generation_prompt: bool = True,
    ) -> str:
        """Returns the conversation as text: control tokens are written out, and `MARK` stands where foreign text must not become one.

        Unless `generation_prompt` is false, the text ends where the answer begins. `begun` is the beginning of the answer, if there is one.
        Raises RequestError if the template refuses the messages or exceeds a limit.
        """
        control = self._vocabulary.control_tokens
        variables = {name: text for name, text in _SPECIAL_TOKENS.items() if text in control} | {
            "messages": self._foreign.guard([_with_thoughts(message) for message in messages]),
            "tools": self._foreign.guard(list(tools)) or None,
            "documents": None,
            "add_generation_prompt": generation_prompt,
            "enable_thinking": thinking,
            "bos_token": self._text_of(self._vocabulary.bos),
            "eos_token": self._text_of(self._vocabulary.eos),
        }
        try:
            return self._renderer.render(variables) + (MARK + self._foreign.guard(begun) if begun else "")
        except TemplateError as error:
            raise RequestError(f"{self.name} refuses this conversation: {error}") from error

    def encode(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), thinking: bool = False) -> list[int]:
        """Returns the conversation's token ids, beginning with the beginning-of-sequence token. See `render` for the arguments."""
        return self.encode_rendered(self.render(messages, tools=tools, thinking=thinking))

    def encode_rendered(self, text: str) -> list[int]:
        """Returns the token ids of a text that `render` returned."""
        bos = self._vocabulary.bos
        ids = [i for part in text.split(MARK) if part for i in self._vocabulary.encode(part, add_bos=False, parse_special=True)]
        return ids if bos < 0 or ids[:1] == [bos] else [bos, *ids]

    def _text_of(self, token: int) -> str:
        return self._vocabulary.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""


def _with_thoughts(message: Message) -> Message:
    """Returns a message with its thoughts under the names that templates read, as in transformers."""
    thoughts = next((message[name] for name in _THOUGHTS if message.get(name) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


class _ForeignText:
    """Copies foreign values for a template: plain JSON types only, with marks in the control tokens that strings spell out."""

    def __init__(self, control: Sequence[str]) -> None:
        self._starts = re.compile("|".join(map(_anywhere, control)))
        self._prefixes = {text[:n].casefold() for text in control for n in range(1, len(text))}
        self._longest = max(map(len, self._prefixes), default=0)
        self._first = frozenset(letter for text in control for letter in (text[0].lower(), text[0].upper()))

    def guard(self, value: Any, depth: int = 0) -> Any:
        """Returns the guarded copy. Raises RequestError for anything but JSON values."""
        if value is None or type(value) in (bool, int, float):
            return value
        if isinstance(value, str):
            return self._marked(str(value))
        if depth >= MAX_NESTING:
            raise RequestError(f"a message is nested more than {MAX_NESTING} levels deep; flatten it")
        if isinstance(value, Mapping):
            return {self._marked(str(key)): self.guard(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.guard(item, depth + 1) for item in value]
        raise RequestError(f"a message holds a {type(value).__name__}; only text, numbers, lists and objects can be sent")

    def _marked(self, text: str) -> str:
        text = text.replace(MARK, "\ufffd")
        if not any(first in text for first in self._first):  # true for almost all texts
            return text
        # The text that follows could complete a control token that begins at the end of this one. A template may trim blanks between them.
        end = len(text.rstrip())
        if any(text[max(end - n, 0) : end].casefold() in self._prefixes for n in range(1, self._longest + 1)):
            text = text[:end] + MARK + text[end:]
        places = [place for start in range(0, len(text), _SLICE) for place in self._places(text, start)]
        return MARK.join(text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True))

    def _places(self, text: str, start: int) -> Iterator[int]:
        """Yields the positions after the first character of each control token in a slice. Other threads can run between two slices."""
        for match in self._starts.finditer(text, start, start + _SLICE + self._longest):
            if match.start() < start + _SLICE:
                yield match.end()


def _anywhere(control: str) -> str:
    """Returns a pattern for a control token's first character, in either case, because Gemma 4 writes parameter types in capitals."""
    first = f"(?i:{re.escape(control[0])})" if control[0].isalpha() else re.escape(control[0])
    return f"{first}(?=(?i:{re.escape(control[1:])}))"


def is_instruction_tuned(bundle: Bundle, vocabulary: Vocabulary) -> bool:
    """Whether the model answers messages: its checkpoint has a chat template, and it has a released size or ends its own turns."""
    manifest, control = bundle.manifest, vocabulary.control_tokens
    ends = manifest.generation.end_tokens if manifest.generation else ()
    # A fine-tuned model may end its turns with another token. The end-of-text token is no sign of turns.
    ends_turns = control.get(TURN_TOKENS[1]) in ends or bool({*ends} & {*control.values()} - {vocabulary.eos})
    return bundle.has(ROLE) and (manifest.architecture.family != _UNKNOWN_FAMILY or ends_turns)


def answering_template(bundle: Bundle, vocabulary: Vocabulary) -> ChatTemplate | None:
    """Returns the bundle's chat template if its model answers messages."""
    return bundle_template(bundle, vocabulary) if is_instruction_tuned(bundle, vocabulary) else None


def bundle_template(bundle: Bundle, vocabulary: Vocabulary) -> ChatTemplate:
    """Returns the bundle's chat template. Without one, returns Gemma 4's turns if the vocabulary has their tokens, else "User:" turns.

    Raises BundleError for a template that is too large, is not UTF-8, or does not compile.
    """
    if not bundle.has(ROLE):
        if all(token in vocabulary.control_tokens for token in TURN_TOKENS):
            return ChatTemplate(TURNS_TEMPLATE, vocabulary, name="the built-in template of turns")
        return ChatTemplate(PLAIN_TEMPLATE, vocabulary, name="the built-in plain template", stop=PLAIN_STOPS)
    path = bundle.path(ROLE)
    with errors_as(BundleError, f"{path} is not UTF-8 text", "export the bundle again", UnicodeDecodeError):
        return ChatTemplate(read_part(path, MAX_TEMPLATE_BYTES, "chat template").decode(), vocabulary, name=str(path))
