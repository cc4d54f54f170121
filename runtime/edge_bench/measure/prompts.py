"""Prompts by domain: those of the package, and the user's own, also as MT-bench, Spec-Bench and ShareGPT write them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from edge_devices.errors import errors_as
from edge_devices.files.limited_read import read_at_most
from edge_runtime.errors import RequestError
from edge_runtime.session.session import Session
from edge_runtime.text.chat_template import MARK, bundle_template

DOMAINS = ("code", "prose", "chat", "structured", "repetitive")
# Prompts of this domain are user turns.
CHAT = "chat"
# Keys under which files hold conversations: lists of texts, or of messages by role. Only the first turn of the user becomes a prompt.
CONVERSATIONS = ("turns", "messages", "conversations")
USERS = ("user", "human")
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
FORMATS = "give a JSON list or lines of texts or of objects with prompt, turns, messages or conversations, or lists of texts by domain"
MAX_FILE_BYTES = 16 << 20
MAX_DOMAIN_LETTERS = 40


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt; `number` counts within its domain, from 0. The bundle's chat template is applied to a user's turn.

    Once it is tokenized, `text` is what other programs tokenize to the same `ids` (with control tokens written out).
    """

    domain: str
    number: int
    text: str
    ids: tuple[int, ...] = ()
    is_turn: bool = False


def shipped_prompts(domains: Sequence[str], count: int) -> list[Prompt]:
    """Returns at most `count` prompts of each domain."""
    prompts = []
    for domain in domains:
        texts = json.loads((files("edge_bench.measure") / "prompt_sets" / f"{domain}.json").read_text(encoding="utf-8"))
        prompts += [Prompt(domain=domain, number=n, text=text, is_turn=domain == CHAT) for n, text in enumerate(texts[:count])]
    return prompts


def read_prompts(path: Path, count: int) -> list[Prompt]:
    """Reads at most `count` of the user's prompts of each domain: JSON as FORMATS has it, or a text file as one prompt.

    The domain is an entry's `category`, else the file's name. Raises RequestError.
    """
    with errors_as(RequestError, f"{path} cannot be read as UTF-8 text", "give a file of prompts", OSError, UnicodeDecodeError):
        text = read_at_most(path, MAX_FILE_BYTES).decode()
    prompts: dict[str, list[Prompt]] = {}
    for domain, prompt, is_turn in _entries(path, text):
        if not 0 < len(domain) <= MAX_DOMAIN_LETTERS:
            raise RequestError(f"{path}: the domain {domain[:MAX_DOMAIN_LETTERS]!r} needs 1 to {MAX_DOMAIN_LETTERS} letters; rename it")
        of_domain = prompts.setdefault(domain, [])
        if len(of_domain) < count:
            of_domain.append(Prompt(domain=domain, number=len(of_domain), text=prompt, is_turn=is_turn or domain == CHAT))
    if not prompts:
        raise RequestError(f"{path} holds no prompt; give at least one")
    return [prompt for of_domain in prompts.values() for prompt in of_domain]


def _entries(path: Path, text: str) -> Iterator[tuple[str, str, bool]]:
    """Yields domain, prompt and whether it is a user's turn."""
    items = _json_items(path, text)
    if items is None and text.strip():
        yield path.stem, text, False
    for number, item in enumerate(items or (), start=1):
        entry = item if isinstance(item, dict) else {}
        by_domain = entry and not entry.keys() & set(CONVERSATIONS) and all(isinstance(texts, list) for texts in entry.values())
        category = entry.get("category")
        name = category if isinstance(category, str) else path.stem
        for domain, each in [(d, each) for d, texts in entry.items() for each in texts] if by_domain else [(name, item)]:
            if (prompt := _prompt(path, each, number))[0]:
                yield domain, *prompt


def _json_items(path: Path, text: str) -> list[Any] | None:
    """Returns the entries of JSON or of JSON Lines, None for each that cannot be read; None for a text that is no JSON."""
    is_json = path.suffix.lower() in JSON_SUFFIXES
    if not is_json and not text.lstrip().startswith(("{", "[")):
        return None
    data, lines = _parsed(text), [line for line in text.split("\n") if line.strip()]
    if data is None and (is_json or isinstance(_parsed(lines[0]), dict)):  # other texts may begin with a bracket
        return [_parsed(line) for line in lines]
    return data if data is None or isinstance(data, list) else [data]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _prompt(path: Path, item: Any, number: int) -> tuple[str, bool]:
    """Returns the text of an entry, empty for a conversation without a turn of the user (ShareGPT has some), and whether it is a turn."""
    text = item.get("prompt") if isinstance(item, dict) else item
    turns = next((item[key] for key in CONVERSATIONS if isinstance(item.get(key), list)), None) if isinstance(item, dict) else None
    if not isinstance(text, str) and turns is not None:
        return next(filter(None, map(_turn, turns)), ""), True
    if not isinstance(text, str) or not text:
        raise RequestError(f"{path}: entry {number} has no text that could be a prompt; {FORMATS}")
    return text, False


def _turn(message: Any) -> str | None:
    """Returns the text of a turn, or of a message of the user; None for others."""
    if isinstance(message, dict):
        is_user = message.get("role", message.get("from")) in USERS
        message = message.get("content", message.get("value")) if is_user else None
    if isinstance(message, list):  # as the OpenAI API has it: parts
        message = "".join(part["text"] for part in message if isinstance(part, dict) and isinstance(part.get("text"), str))
    return message if isinstance(message, str) else None


def prepare(prompts: Sequence[Prompt], session: Session) -> list[Prompt]:
    """Tokenizes prompts for a session's pair. Raises RequestError if its chat template refuses one."""
    vocabulary = session.vocabulary
    template = bundle_template(session.bundle, vocabulary) if any(p.is_turn for p in prompts) else None
    bos = vocabulary.piece(vocabulary.bos, special=True).decode("utf-8", "replace") if template and vocabulary.bos >= 0 else ""
    prepared = []
    for prompt in prompts:
        ids, text = vocabulary.encode(prompt.text), prompt.text
        if template is not None and prompt.is_turn:
            messages = [{"role": "user", "content": prompt.text}]
            ids, text = template.encode(messages), template.render(messages).replace(MARK, "").removeprefix(bos)
        prepared.append(replace(prompt, ids=tuple(ids), text=text))
    return prepared


def long_prompt(prompts: Sequence[Prompt], length: int) -> tuple[int, ...]:
    """Returns `length` ids: those of all prompts in turn, repeated as needed."""
    once = [token for prompt in prompts for token in prompt.ids]
    return tuple((once * (length // len(once) + 1))[:length])
