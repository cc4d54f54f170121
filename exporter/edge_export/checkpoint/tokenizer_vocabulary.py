"""Reads the vocabulary from tokenizer.json and the files beside it, without a tokenizer library.

The result is the vocabulary that llama.cpp's converter writes for Gemma 4. Special tokens are found in the same way as when transformers
loads tokenizer_config.json, and as in gguf-py's SpecialVocab.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_devices.errors import errors_as
from edge_export.checkpoint.safetensors import read_json_object, read_optional_json_object
from edge_export.errors import CheckpointError

TOKENIZER_NAME = "tokenizer.json"
TEMPLATE_NAME, OLD_TEMPLATE_NAME = "chat_template.jinja", "chat_template.json"
# The same limit as in the runtime.
MAX_TEMPLATE_BYTES = 1 << 20
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
SCORE = -1000.0
SPECIAL_KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Special pieces that must appear in the output text, because parsers of chat replies need them.
VISIBLE = frozenset(
    ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'],
)
GEMMA_DEFAULTS = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True, kw_only=True)
class GgufVocabulary:
    """Pieces by id, their GGUF types (llama.cpp's llama_token_type), merges as "left right", and special token ids by kind.

    `folder` contains the tokenizer's files.
    """

    folder: Path
    pieces: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    special_ids: dict[str, int]
    added_at_ends: dict[str, bool]
    chat_template: str | None


@dataclass(frozen=True, kw_only=True)
class AddedToken:
    """An added token: its id, and whether it is a control token."""

    id: int
    special: bool


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """A folder's tokenizer.json: all its pieces with their ids, which may have gaps, and the pieces that are added tokens."""

    folder: Path
    tokenizer: dict[str, Any]
    ids: dict[str, int]
    added: dict[str, AddedToken]


def read_table(folder: Path) -> TokenTable:
    """Reads the pieces of a checkpoint folder's tokenizer. Raises CheckpointError if it is not a Gemma-style BPE tokenizer."""
    path = folder / TOKENIZER_NAME
    tokenizer = read_json_object(path)
    added = {token["content"]: AddedToken(id=token["id"], special=token.get("special") is True) for token in _added(tokenizer, path)}
    return TokenTable(folder=folder, tokenizer=tokenizer, ids=_pieces(tokenizer, path), added=added)


def read_vocabulary(source: Path | TokenTable, others: Mapping[str, AddedToken] | None = None) -> GgufVocabulary:
    """Returns the vocabulary of a checkpoint folder, or of a table that was read from one already.

    `others` are the added tokens of the pair's other half. Those that this half lacks are included. Raises CheckpointError if it is not a
    Gemma-style BPE tokenizer, or if its ids have gaps.
    """
    table = read_table(source) if isinstance(source, Path) else source
    folder, tokenizer, path = table.folder, table.tokenizer, table.folder / TOKENIZER_NAME
    settings = read_optional_json_object(folder / "tokenizer_config.json")
    lacking = {piece: token for piece, token in (others or {}).items() if piece not in table.ids}
    pieces = _by_id(table.ids | {piece: token.id for piece, token in lacking.items()}, path)
    base = len(tokenizer["model"]["vocab"]) + len(lacking)
    named = _named_tokens(folder, settings)
    special = _special_pieces(named) | {piece for piece, token in lacking.items() if token.special}
    return GgufVocabulary(
        folder=folder,
        pieces=pieces,
        types=tuple(_type_of(piece, index, base, special) for index, piece in enumerate(pieces)),
        merges=_merges(tokenizer["model"].get("merges"), path),
        special_ids=_special_ids(table, named),
        added_at_ends=_added_at_ends(tokenizer.get("post_processor"), settings),
        chat_template=_chat_template(folder, settings),
    )


def _pieces(tokenizer: dict[str, Any], path: Path) -> dict[str, int]:
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or model.get("byte_fallback") is not True:
        raise CheckpointError(f"{path} is not a BPE tokenizer with byte fallback, as Gemma 4's is; use the checkpoint's own tokenizer")
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict) or not all(type(index) is int and index >= 0 for index in vocabulary.values()):
        raise CheckpointError(f"{path} has no vocabulary of pieces and ids; download it again")
    return vocabulary | {token["content"]: token["id"] for token in _added(tokenizer, path)}


def _added(tokenizer: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    added = tokenizer.get("added_tokens") or []
    sound = isinstance(added, list) and all(
        isinstance(token, dict) and isinstance(token.get("content"), str) and type(token.get("id")) is int and token["id"] >= 0
        for token in added
    )
    if not sound:
        raise CheckpointError(f"{path} has added tokens without a text or an id; download it again")
    return added


def _by_id(ids: dict[str, int], path: Path) -> tuple[str, ...]:
    pieces: list[str | None] = [None] * len(ids)
    for piece, index in ids.items():
        if index >= len(pieces) or pieces[index] is not None:
            raise CheckpointError(f"{path}: piece {piece!r} has id {index}, which leaves a hole or is taken; download it again")
        pieces[index] = piece
    return tuple(piece for piece in pieces if piece is not None)


def _type_of(piece: str, index: int, base: int, special: set[str]) -> int:
    if piece in VISIBLE:
        return USER_DEFINED
    if index < base and _BYTE_PIECE.fullmatch(piece):
        return BYTE
    if piece in special:
        return CONTROL
    return NORMAL if index < base else USER_DEFINED


def _content(entry: Any) -> str | None:
    """Returns the text of a special token's entry, which is a string or an AddedToken object."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _named_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of tokenizer_config.json.

    If that is in an old format, the entries of special_tokens_map.json override them, as in transformers.
    """
    return settings if "added_tokens_decoder" in settings else settings | read_optional_json_object(folder / "special_tokens_map.json")


def _special_pieces(entries: dict[str, Any]) -> set[str]:
    """Returns the pieces that transformers 5 treats as special: named tokens, model-specific `*_token` entries, extra special tokens."""
    if str(entries.get("tokenizer_class", "")).startswith("Gemma"):
        entries = GEMMA_DEFAULTS | entries
    named = [entry for key, entry in entries.items() if key.endswith("_token")]
    for key in ("extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"):
        more = entries.get(key) or []
        named += list(more.values()) if isinstance(more, dict) else more if isinstance(more, list) else []
    return {text for text in map(_content, named) if text is not None}


def _merges(merges: Any, path: Path) -> tuple[str, ...]:
    """Returns the merges in order of rank. A space inside a piece is written as U+0120, which llama.cpp converts back."""
    if not isinstance(merges, list) or not merges:
        raise CheckpointError(f"{path} has no merges; use the checkpoint's own tokenizer.json")
    if all(isinstance(merge, str) for merge in merges):
        return tuple(merges)
    if not all(isinstance(merge, list) and len(merge) == 2 and all(isinstance(part, str) for part in merge) for merge in merges):
        raise CheckpointError(f"{path} has a merge that is not a pair of pieces; download it again")
    return tuple(" ".join(part.replace(" ", "Ġ") for part in merge) for merge in merges)


def _special_ids(table: TokenTable, named: dict[str, Any]) -> dict[str, int]:
    """Returns the ids of special tokens by kind, such as "bos".

    An id comes from the tokenizer's settings if they name an added token, else from config.json if that has a single id and no list. If
    neither names a bos or eos, it is Gemma's default.
    """
    ids_by_text: dict[str, int] = {}
    for token in _added(table.tokenizer, table.folder / TOKENIZER_NAME):
        ids_by_text.setdefault(token["content"], token["id"])
    texts = {kind: _content(named.get(f"{kind}_token")) for kind in SPECIAL_KINDS}
    special = {kind: ids_by_text[text] for kind, text in texts.items() if text is not None and text in ids_by_text}
    config = read_optional_json_object(table.folder / "config.json")
    inner = config.get("text_config")
    for key, kind in ((f"{kind}_token_id", kind) for kind in SPECIAL_KINDS):
        value = config.get(key)
        if value is None and isinstance(inner, dict):
            value = inner.get(key)
        if type(value) is int and value >= 0:
            special.setdefault(kind, value)
    for kind in ("bos", "eos"):
        if (text := GEMMA_DEFAULTS[f"{kind}_token"]) in ids_by_text:
            special.setdefault(kind, ids_by_text[text])
    return special


def _added_at_ends(post_processor: Any, settings: dict[str, Any]) -> dict[str, bool]:
    """Returns for bos, eos and sep whether the tokenizer adds it. Its template counts first, then tokenizer_config.json."""
    added: dict[str, bool] = {}
    parts = post_processor.get("processors", [post_processor]) if isinstance(post_processor, dict) else []
    for part in parts if isinstance(parts, list) else []:
        if isinstance(part, dict) and part.get("type") == "TemplateProcessing":
            _read_template(part, settings, added)
    for kind in SPECIAL_KINDS:
        flag = settings.get(f"add_{kind}_token")
        if isinstance(flag, bool):
            added.setdefault(kind, flag)
    return {kind: flag for kind, flag in added.items() if kind in ("bos", "eos", "sep")}


def _read_template(part: dict[str, Any], settings: dict[str, Any], added: dict[str, bool]) -> None:
    single, pair = _template_tokens(part.get("single")), _template_tokens(part.get("pair"))
    first, last = (single[0], single[-1]) if len(single) > 1 else (None, None)
    eos, sep = _content(settings.get("eos_token")), _content(settings.get("sep_token"))
    if first is not None:
        added["bos"] = first in (_content(settings.get("bos_token")), _content(settings.get("cls_token")))
    if last is not None:
        added["eos"] = last == eos
    start = 1 if pair and first is not None and pair[0] == first else 0
    middle = pair[start : len(pair) - (1 if pair and last is not None and pair[-1] == last else 0)][1:-1]
    if middle:
        ends_text = {token for token in (eos, sep) if token is not None}
        added["sep"] = (middle[0] in ends_text and last is None) or (len(middle) == 2 and middle[1] in ends_text)


def _template_tokens(entries: Any) -> list[str | None]:
    """Returns the special token of each entry of a template; None for an entry that stands for text."""
    return [_template_token(entry) for entry in entries] if isinstance(entries, list) else []


def _template_token(entry: Any) -> str | None:
    token = entry.get("SpecialToken") if isinstance(entry, dict) else None
    text = token.get("id") if isinstance(token, dict) else None
    return text if isinstance(text, str) else None


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """Returns the default chat template, from the first that has one: chat_template.jinja, tokenizer_config.json, chat_template.json."""
    path = folder / TEMPLATE_NAME
    template: Any = None
    if path.is_file():
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, more than any chat template; check where it came from")
        with errors_as(CheckpointError, f"{path} is not UTF-8 text", "download it again", UnicodeDecodeError):
            template = path.read_text(encoding="utf-8")
    if template is None:
        template = settings.get("chat_template")
    if template is None:
        template = read_optional_json_object(folder / OLD_TEMPLATE_NAME).get("chat_template")
    if isinstance(template, list):
        template = _default_template(template, folder)
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder}: the chat template is a {type(template).__name__}, not text; keep only the default template")
    if template is not None and len(template.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE_BYTES:
        raise CheckpointError(f"{folder}: the chat template is longer than {MAX_TEMPLATE_BYTES} bytes; check where it came from")
    return template


def _default_template(choices: list[Any], folder: Path) -> Any:
    """Returns, as transformers does, the template that is named default in a list, or the only one."""
    named = {choice.get("name"): choice.get("template") for choice in choices if isinstance(choice, dict)}
    if "default" in named:
        return named["default"]
    if len(named) == 1:
        return next(iter(named.values()))
    raise CheckpointError(f"{folder}: none of its {len(choices)} chat templates is named default; keep only the one to use")
