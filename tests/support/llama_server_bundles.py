"""Bundles for llama-server's own tests: the shipped pair, with a tokenizer by which their prompts have as many tokens as there.

Their test model has 512 pieces, most of them letters. Here the merges of the shipped tokenizer are replaced by a few, chosen so that the
texts of these tests are cut into as many tokens; the weights stay, and what they answer is no matter.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

from edge_runtime.bundle.manifest import with_hash
from kept import PAIR, kept, shipped_bundle
from pictures import picture_bundle

# Each word is built from its left or its right end, so that no step of it makes a piece of another text.
_BUILT = (
    ("<", "|"),
    ("|", ">"),
    ("i", "m"),
    ("a", "r"),
    ("a", "n"),
    ("t", "h"),
    ("th", "e"),
    ("▁", "the"),
    ("▁", "i"),
    ("▁i", "s"),
    ("W", "h"),
    ("Wh", "a"),
    ("Wha", "t"),
    ("▁", "b"),
    ("Y", "o"),
    ("Yo", "u"),
    ("▁", "ar"),
    ("▁ar", "e"),
    ("W", "r"),
    ("Wr", "i"),
    ("Wri", "t"),
    ("Writ", "e"),
    ("▁", "f"),
    ("▁", "c"),
    ("+", "+"),
    ("n", "g"),
    ("c", "i"),
    ("p", "l"),
    ("pl", "a"),
    ("pla", "t"),
    ("plat", "e"),
    ("m", "plate"),
    ("e", "mplate"),
)
CHATML = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def bundle_like(folder: Path, *, name: str, template: str | None, media: bool) -> Path:
    """Returns a bundle in `folder` that clients know by this name, with this chat template or ChatML; with `media` it takes images."""
    made = picture_bundle() if media else _text_bundle()
    copy = folder / hashlib.sha256(f"{made} {template}".encode()).hexdigest()[:12] / name
    if copy.exists():
        return copy
    shutil.copytree(made, copy)
    if not media:
        _put(copy, "chat_template", (template or CHATML).encode())
    return copy


def _put(bundle: Path, role: str, data: bytes) -> None:
    """Puts a file of a bundle in place of that of this role."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    entry = next(file for file in manifest["files"] if file["role"] == role)
    entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (bundle / entry["path"]).write_bytes(data)
    (bundle / "manifest.json").write_text(with_hash(manifest))


def _text_bundle() -> Path:
    checkpoint = kept("letters", {"built": _BUILT}, _write_checkpoint)
    return shipped_bundle(target=str(checkpoint / "target"), drafter=str(checkpoint / "drafter"))


def _write_checkpoint(folder: Path) -> None:
    for half in ("target", "drafter"):
        shutil.copytree(PAIR / half, folder / half)
        _use_letters(folder / half / "tokenizer.json")


def _use_letters(path: Path) -> None:
    """Rewrites a tokenizer. Pieces that no merge makes any more get names that no text has: a text can be written in one way alone."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    used = {piece for a, b in _BUILT for piece in (a, b, a + b)}
    control = {token["content"] for token in tokenizer["added_tokens"]}
    kept_pieces = used | control | {piece for piece in vocabulary if len(piece) == 1 or re.fullmatch(r"<0x..>", piece)}
    free = [number for piece, number in vocabulary.items() if piece not in kept_pieces]
    pieces = {piece: number for piece, number in vocabulary.items() if piece in kept_pieces}
    missing = sorted(used - set(pieces))
    pieces |= dict(zip(missing, free, strict=False)) | {f"\u00a7{number}": number for number in free[len(missing) :]}
    tokenizer["model"] |= {"vocab": pieces, "merges": [list(pair) for pair in _BUILT]}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
