"""One PROMPT of edge-run: as bare text, or as a message through the bundle's chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edge_runtime.cli.chat import ChatValues
from edge_runtime.media.soft_rows import MediaPrompt
from edge_runtime.session.generation import Generation
from edge_runtime.session.session import Session
from edge_runtime.text.channels import ChannelParser, Event, Text
from edge_runtime.text.chat_template import ROLE, ChatTemplate, bundle_template

# The family of a model whose size is none of the released ones (exporter's SIZES): whether it was tuned to answer is not known.
_UNKNOWN_FAMILY = "custom"


@dataclass(frozen=True, kw_only=True)
class OnePrompt:
    """What is sent to the model; `template` is None for bare text."""

    sent: str | list[int] | MediaPrompt
    template: ChatTemplate | None

    def text(self, session: Session, generation: Generation, stop: Sequence[str]) -> Iterator[str]:
        """Yields the answer piece by piece; of a message's answer only the text, without thoughts and tool calls."""
        if self.template is None:
            yield from generation
            return
        parser = ChannelParser(session.vocabulary, (*stop, *self.template.stop))
        for one in generation.rounds():
            for token in one.tokens:
                yield from _texts(parser.feed(token))
            if parser.stopped_by is not None:
                break
        yield from _texts(parser.finish())


def read_one_prompt(session: Session, prompt: str, values: ChatValues, *, bare: bool) -> OnePrompt:
    """Returns what PROMPT is sent as. Where nobody chose, `bare` keeps it bare text. Raises RequestError if the template refuses it."""
    templated = not values.raw if values.raw is not None else values.system is not None or values.thinking
    if not templated and (values.raw or bare or not is_instruction_tuned(session)):
        return OnePrompt(sent=prompt, template=None)
    template = bundle_template(session.bundle, session.vocabulary)
    ids = template.encode([*values.system_message(), {"role": "user", "content": prompt}], tools=(), thinking=values.thinking)
    return OnePrompt(sent=ids, template=template)


def media_message(session: Session, media: MediaPrompt) -> OnePrompt:
    """Returns a message with images or sound, whose answer is read as that of any message."""
    return OnePrompt(sent=media, template=bundle_template(session.bundle, session.vocabulary) if session.bundle.has(ROLE) else None)


def is_instruction_tuned(session: Session) -> bool:
    """Whether the model answers messages: a released size of Gemma 4 whose checkpoint came with a chat template."""
    return session.bundle.has(ROLE) and session.bundle.manifest.architecture.family != _UNKNOWN_FAMILY


def _texts(events: list[Event]) -> Iterator[str]:
    for event in events:
        if isinstance(event, Text):
            yield event.text
