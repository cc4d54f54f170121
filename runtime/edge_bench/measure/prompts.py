"""Prompts by domain: those of the package, and the user's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from edge_devices.files.limited_read import read_at_most
from edge_runtime.errors import RequestError
from edge_runtime.session.session import Session
from edge_runtime.text.chat_template import MARK, bundle_template

DOMAINS = ("code", "prose", "chat", "structured", "repetitive")
# Prompts of this domain are user turns; the bundle's chat template is applied to them.
CHAT = "chat"
MAX_FILE_BYTES = 16 << 20
MAX_DOMAIN_LETTERS = 40


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt; `number` counts within its domain, from 0.

    Once it is tokenized, `text` is what other programs tokenize to the same `ids` (with control tokens written out).
    """

    domain: str
    number: int
    text: str
    ids: tuple[int, ...] = ()


def shipped_prompts(domains: Sequence[str], count: int) -> list[Prompt]:
    """Returns at most `count` prompts of each domain."""
    prompts = []
    for domain in domains:
        texts = json.loads((files("edge_bench.measure") / "prompt_sets" / f"{domain}.json").read_text(encoding="utf-8"))
        prompts += [Prompt(domain=domain, number=number, text=text) for number, text in enumerate(texts[:count])]
    return prompts


def read_prompts(path: Path, count: int) -> list[Prompt]:
    """Reads the user's prompts: a JSON list of texts, an object of such lists by domain, or a text file as one prompt.

    The domain of a list or text is the file's name. Raises RequestError.
    """
    try:
        text = read_at_most(path, MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read as UTF-8 text ({error}); give a file of prompts") from error
    sets = _json_sets(path, text) if path.suffix == ".json" else {path.stem: [text]}
    prompts = []
    for domain, texts in sets.items():
        if not 0 < len(domain) <= MAX_DOMAIN_LETTERS:
            raise RequestError(f"{path}: the domain {domain[:MAX_DOMAIN_LETTERS]!r} needs 1 to {MAX_DOMAIN_LETTERS} letters; rename it")
        prompts += [Prompt(domain=domain, number=number, text=text) for number, text in enumerate(texts[:count])]
    if not prompts:
        raise RequestError(f"{path} holds no prompt; give at least one")
    return prompts


def _json_sets(path: Path, text: str) -> dict[str, list[str]]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON ({error}); give a list of texts, or an object of lists by domain") from error
    sets = data if isinstance(data, dict) else {path.stem: data}
    for domain, texts in sets.items():
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise RequestError(
                f"{path}: {domain!r} is not a list of non-empty texts; give a list of texts, or an object of lists by domain"
            )
    return sets


def prepare(prompts: Sequence[Prompt], session: Session) -> list[Prompt]:
    """Tokenizes prompts for a session's pair. Raises RequestError if its chat template refuses one."""
    vocabulary = session.vocabulary
    template = bundle_template(session.bundle, vocabulary) if any(p.domain == CHAT for p in prompts) else None
    bos = vocabulary.piece(vocabulary.bos, special=True).decode("utf-8", "replace") if template and vocabulary.bos >= 0 else ""
    prepared = []
    for prompt in prompts:
        ids, text = vocabulary.encode(prompt.text), prompt.text
        if template is not None and prompt.domain == CHAT:
            messages = [{"role": "user", "content": prompt.text}]
            ids, text = template.encode(messages), template.render(messages).replace(MARK, "").removeprefix(bos)
        prepared.append(replace(prompt, ids=tuple(ids), text=text))
    return prepared


def long_prompt(prompts: Sequence[Prompt], length: int) -> tuple[int, ...]:
    """Returns `length` ids: those of all prompts in turn, repeated as needed."""
    once = [token for prompt in prompts for token in prompt.ids]
    return tuple((once * (length // len(once) + 1))[:length])
