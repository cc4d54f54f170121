"""A chat without a model: a vocabulary of bytes and Gemma 4's control tokens, and a target that says what the script has."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.manifest import BundleFile
from edge_runtime.interfaces import Logits
from edge_runtime.session.session import Session
from edge_runtime.text.chat_template import ROLE
from scripted import MANIFEST, CopiedRows, ScriptedDrafter, ScriptedTarget, make_session, one_hot

CONTROL = """
    <pad> <eos> <bos> <|turn> <turn|> <|think|> <|channel> <channel|> <|tool> <tool|> <|tool_call> <tool_call|>
    <|tool_response> <tool_response|> <|"|> <unk> <mask> [multimodal] [@BOS@] <start_of_turn> <end_of_turn>
    <start_of_image> <image_soft_token> <|image> <|image|> <image|> <|audio> <|audio|> <audio|> <|video|>
""".split()
# As long and as winding as published ones: macros, namespaces, tools, calls and their results, thoughts stripped from history.
GEMMA_LIKE = """
{%- macro quoted(value) -%}
  {%- if value is string -%}{{ '<|"|>' + value + '<|"|>' }}
  {%- elif value is boolean -%}{{ 'true' if value else 'false' }}
  {%- elif value is mapping -%}
    {{- '{' }}{% for key, item in value | dictsort %}{{ key }}:{{ quoted(item) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}
  {%- elif value is sequence -%}
    {{- '[' }}{% for item in value %}{{ quoted(item) }}{{ ',' if not loop.last }}{% endfor %}{{ ']' }}
  {%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{%- macro without_thoughts(text) -%}
  {%- set ns = namespace(kept='') -%}
  {%- for part in text.split('<channel|>') -%}
    {%- set ns.kept = ns.kept + (part.split('<|channel>')[0] if '<|channel>' in part else part) -%}
  {%- endfor -%}
  {{- ns.kept | trim -}}
{%- endmacro -%}
{{- bos_token -}}
{%- set rest = messages -%}
{%- if enable_thinking or tools or messages[0]['role'] in ['system', 'developer'] -%}
  {{- '<|turn>system\n' -}}
  {%- if enable_thinking %}{{ '<|think|>\n' }}{% endif -%}
  {%- if messages[0]['role'] in ['system', 'developer'] -%}
    {{- messages[0]['content'] | trim -}}
    {%- set rest = messages[1:] -%}
  {%- endif -%}
  {%- for tool in tools or [] -%}
    {{- '<|tool>declaration:' + tool['function']['name'] + quoted(tool['function']['parameters']) + '<tool|>' -}}
  {%- endfor -%}
  {{- '<turn|>\n' -}}
{%- endif -%}
{%- set state = namespace(open=false) -%}
{%- for message in rest -%}
  {%- if message.role == 'tool' -%}
    {{- '<|tool_response>response:' + message.name + '{value:' + quoted(message.content) + '}<tool_response|>' -}}
  {%- else -%}
    {{- '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' -}}
    {%- if message.get('reasoning_content') %}{{ '<|channel>thought\n' + message.reasoning_content + '<channel|>' }}{% endif -%}
    {{- without_thoughts(message['content']) if message.role == 'assistant' else message['content'] | trim -}}
    {%- set state.open = false -%}
    {%- for call in message.get('tool_calls') or [] -%}
      {{- '<|tool_call>call:' + call['function']['name'] + quoted(call['function']['arguments']) + '<tool_call|>' -}}
      {%- set state.open = true -%}
    {%- endfor -%}
    {%- if not state.open %}{{ '<turn|>\n' }}{% endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not state.open %}{{ '<|turn>model\n' }}{% endif -%}
"""
FIRST_BYTE = 100
CERTAIN = 100.0
_SPLIT = re.compile("(" + "|".join(map(re.escape, CONTROL)) + ")")
_ANSWER_BEGINS = "<|turn>model\n"


class ChatWords:
    """Ids below 100 are control tokens, the rest 100 + byte. As in llama.cpp some control tokens are never kept out of text."""

    eog_tokens = frozenset({CONTROL.index("<eos>"), CONTROL.index("<turn|>"), CONTROL.index("<|tool_response>")})
    bos = CONTROL.index("<bos>")
    eos = CONTROL.index("<eos>")
    visible = frozenset({"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'})
    size = FIRST_BYTE + 256

    def __init__(self, control: Sequence[str] = CONTROL) -> None:
        self.control_tokens: Mapping[str, int] = {text: CONTROL.index(text) for text in control}

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        ids = [self.bos] if add_bos else []
        for word in _SPLIT.split(text):
            if word in self.control_tokens and (parse_special or word in self.visible):
                ids.append(CONTROL.index(word))
            else:
                ids += [FIRST_BYTE + byte for byte in word.encode("utf-8", "replace")]
        return ids

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if len(CONTROL) <= token < FIRST_BYTE:
            return b""
        if token < FIRST_BYTE:
            return CONTROL[token].encode() if special or CONTROL[token] in self.visible else b""
        return bytes([token - FIRST_BYTE])

    def spell(self, ids: Sequence[int]) -> str:
        return b"".join(self.piece(i, special=True) for i in ids).decode("utf-8", "replace")


class SpeakingTarget(ScriptedTarget):
    """Answers the n-th turn of the conversation in its cache with `replies(n, the conversation)`, then ends the turn."""

    def __init__(self, replies: Callable[[int, str], str], context: int = 2048) -> None:
        super().__init__(context=context)
        self.vocabulary = ChatWords()
        self._replies = replies

    def next_token(self, cache: Sequence[int]) -> int:
        begins = self.vocabulary.encode(_ANSWER_BEGINS, add_bos=False, parse_special=True)
        turns = [i for i in range(len(cache)) if list(cache[i : i + len(begins)]) == begins]
        if not turns:  # no conversation: rows that are compared
            return CONTROL.index("<pad>")
        output = self.vocabulary.spell(cache[: turns[-1]])
        reply = self.vocabulary.encode(self._replies(len(turns) - 1, output), add_bos=False, parse_special=True)
        answer = list(cache[turns[-1] + len(begins) :])
        if reply[: len(answer)] != answer:
            return CONTROL.index("<pad>")  # after a wrong draft; anywhere else it shows that the cache is wrong
        return reply[len(answer)] if len(answer) < len(reply) else CONTROL.index("<turn|>")

    def row(self, context: Sequence[int]) -> Logits:
        return one_hot(self.next_token(context), ChatWords.size, CERTAIN)


class SavableSpeakingTarget(CopiedRows, SpeakingTarget):
    """The same, whose rows can be copied out and put back."""


def chat_session(
    *replies: str | Callable[[int, str], str], context: int = 2048, drafts: bool = False, kind: type[SpeakingTarget] = SpeakingTarget
) -> Session:
    """A session that gives these replies, then repeats the last one; `drafts` adds a drafter that is right where an answer has blanks."""

    def reply(turn: int, output: str) -> str:
        single: Any = replies[min(turn, len(replies) - 1)]
        return single if isinstance(single, str) else single(turn, output)

    target = kind(reply, context)
    drafter = ScriptedDrafter(target, lambda *_: FIRST_BYTE + ord(" ")) if drafts else None
    manifest = replace(MANIFEST, architecture=replace(MANIFEST.architecture, vocab_size=ChatWords.size))
    return make_session(bundle=Bundle(Path("nowhere"), manifest), target=target, drafter=drafter, vocabulary=target.vocabulary)


def with_template(session: Session, source: str, folder: Path) -> Session:
    """Gives the session's bundle a chat template of its own, a file in `folder`; returns the session."""
    (folder / "template.jinja").write_text(source, encoding="utf-8")
    file = BundleFile(path="template.jinja", role=ROLE, format="jinja", bytes=len(source), sha256="")
    session.bundle = Bundle(folder, replace(session.bundle.manifest, files=(file,)))
    return session
